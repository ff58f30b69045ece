// Generated from openapi/dashboard.json by `npm run api`.
export interface paths {
    "/api/barriers": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Barriers
         * @description List the waiting barriers, and those released in the current generation.
         */
        get: operations["barriers_api_barriers_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/checkpoints": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Checkpoints
         * @description List the remembered checkpoints, oldest first, then those that are not committed yet.
         */
        get: operations["checkpoints_api_checkpoints_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/data": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Data
         * @description Return the datasets of a job, the shards of one of them by owner, and the ranks that wait for data.
         */
        get: operations["data_api_data_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/datasets": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Datasets
         * @description List datasets and their progress in the current epoch.
         */
        get: operations["datasets_api_datasets_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/events": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Events
         * @description List events with their reasons, oldest first, as far back as the history of the journal reaches.
         */
        get: operations["events_api_events_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/goodput": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Goodput
         * @description Return where the wall time of a job went: parts that add up to its time, multiplied by its ranks.
         */
        get: operations["goodput_api_goodput_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/health": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Health
         * @description Return 200 while calls are processed, and 503 with the reason while they are not. Needs no token.
         */
        get: operations["health_api_health_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/history": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * History
         * @description Return series over a range of time, in the finest resolution that fits into `max_points`.
         */
        get: operations["history_api_history_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/jobs": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Jobs
         * @description List jobs in the order of their creation.
         */
        get: operations["jobs_api_jobs_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/lineage": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Lineage
         * @description Return the committed checkpoints of a job, newest first, with the attempts that made and resumed them.
         */
        get: operations["lineage_api_lineage_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/live": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Live
         * @description Stream what changes as server-sent events, from a cursor on.
         */
        get: operations["live_api_live_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/login": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Login
         * @description Exchange a token for a session cookie.
         */
        post: operations["login_api_login_post"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/logout": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Logout
         * @description End the session of the cookie. Without one, nothing happens.
         */
        post: operations["logout_api_logout_post"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/overview": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Overview
         * @description Return what a first look needs: health, jobs, workers by state, newest values. At most a second old.
         */
        get: operations["overview_api_overview_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/recoveries": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Recoveries
         * @description Return every failure of a run, newest first, with its moments from the detection to the first step.
         */
        get: operations["recoveries_api_recoveries_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/run": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Info
         * @description Return the run whose page this is; null for a coordinator of its own.
         */
        get: operations["info_api_run_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/run/log": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Log
         * @description Return the end of a worker's log.
         */
        get: operations["log_api_run_log_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/run/scale": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Scale
         * @description Change the number of workers: they save, and continue with another world size.
         */
        post: operations["scale_api_run_scale_post"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/run/stacks": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Stacks
         * @description Write the stacks of a worker's threads to its log; the worker continues.
         */
        post: operations["stacks_api_run_stacks_post"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/run/stop": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Stop
         * @description Stop the run: after a checkpoint, or now.
         */
        post: operations["stop_api_run_stop_post"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/series": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Series
         * @description List the series that have a history, by job and name.
         */
        get: operations["series_api_series_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/servers": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Servers
         * @description Return the parameter servers of a job, with what each has measured, and their total.
         */
        get: operations["servers_api_servers_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/session": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Session
         * @description Return whether the page must log in first. Needs no token.
         */
        get: operations["session_api_session_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/status": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Status
         * @description Return an overview of the coordinator.
         */
        get: operations["status_api_status_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/studies": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * All Studies
         * @description List the studies of this server.
         */
        get: operations["all_studies_api_studies_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/study": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Study Info
         * @description Return a study as its journal has it now.
         */
        get: operations["study_info_api_study_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/study/curves": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Curves
         * @description Return the reports of trials over their steps: those asked for, then running ones, then the best.
         */
        get: operations["curves_api_study_curves_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/study/history": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * History
         * @description Return the results in the order in which trials ended, and each improvement.
         */
        get: operations["history_api_study_history_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/study/importances": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Importances
         * @description Return how much each parameter matters, for one objective or for all of them.
         */
        get: operations["importances_api_study_importances_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/study/parallel": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Parallel
         * @description Return finished trials as lines through their parameters.
         */
        get: operations["parallel_api_study_parallel_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/study/pareto": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Pareto
         * @description Return two metrics of finished trials, and which of them are on the Pareto front.
         */
        get: operations["pareto_api_study_pareto_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/study/trial": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Trial
         * @description Return one trial; null if the study has none of this number.
         */
        get: operations["trial_api_study_trial_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/study/trial/requeue": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Requeue
         * @description Let a running trial save and start again from its checkpoint. The order is in the journal then.
         */
        post: operations["requeue_api_study_trial_requeue_post"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/study/trial/stop": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Stop
         * @description Stop a trial that has started, for good: it ends as pruned. The order is in the journal then.
         */
        post: operations["stop_api_study_trial_stop_post"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/study/trials": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Trials
         * @description List trials. Those without the value to sort by come last.
         */
        get: operations["trials_api_study_trials_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/time": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Time
         * @description Return how the ranks of a job spent the last three minutes, as they measured it.
         */
        get: operations["time_api_time_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/workers": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Workers
         * @description List the workers by job and rank.
         */
        get: operations["workers_api_workers_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/metrics": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Metrics
         * @description Return metrics for Prometheus; see docs/metrics.md. A standby exports no jobs.
         */
        get: operations["metrics_metrics_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
}
export type webhooks = Record<string, never>;
export interface components {
    schemas: {
        /** Barrier */
        Barrier: {
            /** Barrier Id */
            barrier_id: string;
            /** Generation */
            generation: number;
            /** Job Id */
            job_id: string;
            /**
             * Missing
             * @description Workers that have not arrived; the first 32.
             */
            missing: string[];
            /** Num Arrived */
            num_arrived: number;
            /** Num Members */
            num_members: number;
            /**
             * Remaining S
             * @description Seconds until it times out; null once released.
             */
            remaining_s: number | null;
            /**
             * State
             * @enum {string}
             */
            state: "open" | "released";
            /** Step */
            step: number;
            /**
             * Waited S
             * @description Seconds since the first arrival; null once released.
             */
            waited_s: number | null;
        };
        /** Checkpoint */
        Checkpoint: {
            /** Checkpoint Id */
            checkpoint_id: string;
            /**
             * Committed At S
             * @description Seconds since 1970; null while it is open.
             */
            committed_at_s: number | null;
            /**
             * Data Cursor Bytes
             * @description The size of its data cursor.
             */
            data_cursor_bytes: number;
            /** Epoch */
            epoch: number;
            /** Generation */
            generation: number;
            /** Hashes */
            hashes: {
                [key: string]: string;
            };
            /** Job Id */
            job_id: string;
            /** Metadata */
            metadata: {
                [key: string]: string;
            };
            /** Model Hash */
            model_hash: string;
            /** Num Acked */
            num_acked: number;
            /** Num Ranks */
            num_ranks: number;
            /** Path */
            path: string;
            /** Size Bytes */
            size_bytes: number;
            /**
             * State
             * @description open: some ranks have not acknowledged it yet.
             * @enum {string}
             */
            state: "committed" | "open";
            /** Step */
            step: number;
            /**
             * Type
             * @enum {string}
             */
            type: "FULL" | "INCREMENTAL" | "OPTIMIZER_ONLY" | "MODEL_ONLY";
        };
        /** CheckpointLine */
        CheckpointLine: {
            /**
             * Attempt
             * @description The attempt that made it; null if that is not recorded.
             */
            attempt: number | null;
            /** Checkpoint Id */
            checkpoint_id: string;
            /** Committed At S */
            committed_at_s: number;
            /** Epoch */
            epoch: number;
            /** Generation */
            generation: number;
            /** Num Ranks */
            num_ranks: number;
            /**
             * Resumed By
             * @description Attempts that were started from it, in order.
             */
            resumed_by: components["schemas"]["CheckpointResume"][];
            /**
             * Size Bytes
             * @description What its ranks wrote.
             */
            size_bytes: number;
            /** Step */
            step: number;
            /**
             * Type
             * @enum {string}
             */
            type: "FULL" | "INCREMENTAL" | "OPTIMIZER_ONLY" | "MODEL_ONLY";
        };
        /** CheckpointResume */
        CheckpointResume: {
            /**
             * At S
             * @description When rank 0 had loaded it.
             */
            at_s: number;
            /** Attempt */
            attempt: number;
        };
        /** CoordinatorFigures */
        CoordinatorFigures: {
            /** At S */
            at_s: number;
            /**
             * Barrier P50 S
             * @description Over the last minute; null if no barrier was released in it.
             */
            barrier_p50_s: number | null;
            /** Barrier P99 S */
            barrier_p99_s: number | null;
            /** Num Jobs */
            num_jobs: number;
            /** Num Sessions */
            num_sessions: number;
            /** Num Suspects */
            num_suspects: number;
            /** Num Workers */
            num_workers: number;
            /**
             * Requests Per S
             * @description Over the last 10 seconds.
             */
            requests_per_s: number;
            /** Workers By State */
            workers_by_state: {
                [key: string]: number;
            };
        };
        /** Dataset */
        Dataset: {
            /** Complete */
            complete: boolean;
            /** Dataset Id */
            dataset_id: string;
            /** Epoch */
            epoch: number;
            /** Job Id */
            job_id: string;
            /** Num Done */
            num_done: number;
            /** Num Shards */
            num_shards: number;
            /** Seed */
            seed: number;
            /** Shuffle */
            shuffle: boolean;
            /** Total Samples */
            total_samples: number;
        };
        /** ErrorBody */
        ErrorBody: {
            error: components["schemas"]["Problem"];
        };
        /** EventLine */
        EventLine: {
            /**
             * At
             * @description The same, as ISO 8601 in UTC.
             */
            at: string;
            /**
             * At S
             * @description Seconds since 1970.
             */
            at_s: number;
            /** Generation */
            generation: number | null;
            /** Job Id */
            job_id: string;
            /** Kind */
            kind: string;
            /**
             * Reason
             * @description The reason alone, if the event has one.
             */
            reason: string | null;
            /** Seq */
            seq: number;
            /**
             * Words
             * @description What happened and why.
             */
            words: string;
            /**
             * Worker Id
             * @description The worker concerned, if it is a single one.
             */
            worker_id: string | null;
        };
        /** EventPage */
        EventPage: {
            /** After */
            after: number;
            /** Items */
            items: components["schemas"]["EventLine"][];
            /** Limit */
            limit: number;
            /**
             * More
             * @description Whether more events may follow. A page may be short or even empty and still have more: one request reads at most 10,000 events.
             */
            more: boolean;
            /**
             * Next After
             * @description Pass this as `after` to continue; at the end, to get newer events.
             */
            next_after: number;
        };
        /** Goodput */
        Goodput: {
            /** At S */
            at_s: number;
            /**
             * Attempts
             * @description The newest 200, in order.
             */
            attempts: components["schemas"]["GoodputEntry"][];
            /** Job Id */
            job_id: string;
            /** Num Attempts */
            num_attempts: number;
            /** @description Null if no worker has joined yet. */
            run: components["schemas"]["GoodputEntry"] | null;
        };
        /** GoodputEntry */
        GoodputEntry: {
            /**
             * Attempt
             * @description Null for the whole run.
             */
            attempt: number | null;
            /** Began At S */
            began_at_s: number;
            /** Ended At S */
            ended_at_s: number;
            /**
             * Goodput
             * @description The share of computing, without steps computed twice.
             */
            goodput: number | null;
            /**
             * Num Ranks
             * @description Of the run: the most ranks of an attempt.
             */
            num_ranks: number;
            /** Parts S */
            parts_s: {
                [key: string]: number;
            };
            /**
             * Total S
             * @description Wall time multiplied by ranks; the sum of the parts.
             */
            total_s: number;
        };
        /** Health */
        Health: {
            /**
             * Reason
             * @description Why calls are refused, or the address of the leader.
             */
            reason?: string | null;
            /**
             * Status
             * @enum {string}
             */
            status: "ok" | "refusing" | "standby";
        };
        /** HealthFinding */
        HealthFinding: {
            /**
             * Job Id
             * @description Empty for the coordinator.
             */
            job_id: string;
            /**
             * Kind
             * @enum {string}
             */
            kind: "journal" | "failed" | "disconnected" | "silent" | "stalled" | "barrier" | "not_finite" | "slow";
            /**
             * Level
             * @enum {string}
             */
            level: "ok" | "warning" | "error";
            /** Line */
            line: string;
            /** Rank */
            rank: number | null;
            /** Worker Id */
            worker_id: string | null;
        };
        /** HealthState */
        HealthState: {
            /**
             * Findings
             * @description The most important first; at most 8.
             */
            findings: components["schemas"]["HealthFinding"][];
            /**
             * Level
             * @enum {string}
             */
            level: "ok" | "warning" | "error";
            /**
             * Line
             * @description The most important finding; without one, what is well.
             */
            line: string;
            /** Num Findings */
            num_findings: number;
        };
        /** Hello */
        Hello: {
            /** Cursor */
            cursor: string;
            /**
             * Interval S
             * @description Seconds between two samples.
             */
            interval_s: number;
            /** Version */
            version: string;
        };
        /** History */
        History: {
            /**
             * Cursor
             * @description Pass this to /api/live to get what is newer.
             */
            cursor: string;
            /** Job Id */
            job_id: string;
            /**
             * Series
             * @description In the order asked for; names without values have no points.
             */
            series: components["schemas"]["SeriesPoints"][];
        };
        /** Job */
        Job: {
            /** Checkpoint Id */
            checkpoint_id: string | null;
            /** Checkpoint Step */
            checkpoint_step: number | null;
            /** Generation */
            generation: number;
            /** Job Id */
            job_id: string;
            /** Num Checkpoints */
            num_checkpoints: number;
            /** Num Datasets */
            num_datasets: number;
            /** Num Open Barriers */
            num_open_barriers: number;
            /**
             * Num Suspects
             * @description Workers that lost their connection and have not reconnected.
             */
            num_suspects: number;
            /** Num Workers */
            num_workers: number;
            /**
             * Reason
             * @description Why this generation started.
             */
            reason: string;
        };
        /** JobChanged */
        JobChanged: {
            /** At S */
            at_s: number;
            job: components["schemas"]["JobSummary"];
        };
        /** JobData */
        JobData: {
            /** At S */
            at_s: number;
            /**
             * Datasets
             * @description The first 100.
             */
            datasets: components["schemas"]["Dataset"][];
            /** Job Id */
            job_id: string;
            /** Num Datasets */
            num_datasets: number;
            /**
             * Num Measured
             * @description Ranks that have measured the last half minute.
             */
            num_measured: number;
            /** Num Ranks */
            num_ranks: number;
            /** Num Waits */
            num_waits: number;
            /** @description Of the dataset asked for, or else the first that is not finished. */
            shards: components["schemas"]["JobShards"] | null;
            /**
             * Waits
             * @description Ranks that wait for data, longest first; at most 50.
             */
            waits: components["schemas"]["RankDataWait"][];
        };
        /** JobGone */
        JobGone: {
            /** At S */
            at_s: number;
            /** Job Id */
            job_id: string;
        };
        /** JobLineage */
        JobLineage: {
            /** @description Newest first; those that the coordinator remembers. */
            checkpoints: components["schemas"]["Page_CheckpointLine_"];
            /**
             * Is Recorded
             * @description False if this coordinator has no timeline of the job, and so no attempts.
             */
            is_recorded: boolean;
            /** Job Id */
            job_id: string;
        };
        /** JobServers */
        JobServers: {
            /** Job Id */
            job_id: string;
            /** @description By number. */
            servers: components["schemas"]["Page_Server_"];
            /** @description Of all servers; null without any. */
            total: components["schemas"]["ServerFigures"] | null;
        };
        /** JobShards */
        JobShards: {
            dataset: components["schemas"]["Dataset"];
            /** @description Null if the newest 20,000 entries of the journal have none. */
            last_move: components["schemas"]["ShardMove"] | null;
            /** Max Left */
            max_left: number | null;
            /** Max Per Worker */
            max_per_worker: number | null;
            /** Mean Per Worker */
            mean_per_worker: number | null;
            /**
             * Min Left
             * @description The fewest unfinished shards of a worker.
             */
            min_left: number | null;
            /**
             * Min Per Worker
             * @description The fewest shards of a worker; null without workers.
             */
            min_per_worker: number | null;
            /**
             * Num Waiting
             * @description Shards without an owner.
             */
            num_waiting: number;
            /** @description By rank; before them the shards without an owner, if any. */
            owners: components["schemas"]["Page_ShardOwner_"];
            /**
             * Shards Per Cell
             * @description The last cell of an owner may have fewer.
             */
            shards_per_cell: number;
        };
        /** JobSummary */
        JobSummary: {
            /**
             * Attempt
             * @description Number of earlier starts of the run's workers, if known.
             */
            attempt: number | null;
            /**
             * Checkpoint Age S
             * @description Seconds since the last checkpoint was committed.
             */
            checkpoint_age_s: number | null;
            /** Checkpoint Id */
            checkpoint_id: string | null;
            /** Checkpoint Step */
            checkpoint_step: number | null;
            /**
             * Data Fraction
             * @description Shards done in this epoch, of all datasets; null without one.
             */
            data_fraction: number | null;
            /** Epoch */
            epoch: number | null;
            /** Generation */
            generation: number;
            health: components["schemas"]["HealthState"];
            /** Job Id */
            job_id: string;
            /**
             * Num Servers
             * @description Parameter servers; they are not counted as workers.
             */
            num_servers: number;
            /** Num Suspects */
            num_suspects: number;
            /** Num Workers */
            num_workers: number;
            /**
             * Reason
             * @description Why this generation started.
             */
            reason: string;
            /** Rows Per S */
            rows_per_s: number | null;
            /**
             * State
             * @enum {string}
             */
            state: "waiting" | "starting" | "loading" | "training" | "saving" | "recovering" | "idle" | "error";
            /**
             * Step
             * @description The lowest step of all ranks; null without workers.
             */
            step: number | null;
            /** Steps Per S */
            steps_per_s: number | null;
            /** Workers By State */
            workers_by_state: {
                [key: string]: number;
            };
        };
        /** JobTime */
        JobTime: {
            /** Job Id */
            job_id: string;
            /**
             * No Verdict
             * @description Why there is no verdict; empty if there is one.
             */
            no_verdict: string;
            /** @description The rank that the others wait for; null without a verdict. */
            straggler: components["schemas"]["RankStraggler"] | null;
            /** @description By rank; those that have not measured anything have empty lists. */
            workers: components["schemas"]["Page_WorkerTime_"];
        };
        /**
         * LiveEvents
         * @description The data of each event of `/api/live`, by the event's name.
         */
        LiveEvents: {
            coordinator: components["schemas"]["CoordinatorFigures"];
            events: components["schemas"]["NewEvents"];
            gone: components["schemas"]["JobGone"];
            health: components["schemas"]["HealthState"];
            hello: components["schemas"]["Hello"];
            job: components["schemas"]["JobChanged"];
            points: components["schemas"]["Points"];
            reset: components["schemas"]["Reset"];
            workers: components["schemas"]["WorkersChanged"];
        };
        /** LoginAnswer */
        LoginAnswer: {
            /**
             * Expires S
             * @description Seconds until the session ends.
             */
            expires_s: number;
            /**
             * Role
             * @enum {string}
             */
            role: "reader" | "worker" | "admin";
        };
        /** NewEvents */
        NewEvents: {
            /**
             * Is Complete
             * @description False if more events happened than fit: load /api/events again.
             */
            is_complete: boolean;
            /** Items */
            items: components["schemas"]["EventLine"][];
        };
        /** Overview */
        Overview: {
            /** At S */
            at_s: number;
            /**
             * Barrier P50 S
             * @description Over the last minute; null if no barrier was released in it.
             */
            barrier_p50_s: number | null;
            /** Barrier P99 S */
            barrier_p99_s: number | null;
            /**
             * Cursor
             * @description Pass this to /api/live to get what is newer.
             */
            cursor: string;
            /** @description The end of the run whose page this is; null while it is active. */
            ended: components["schemas"]["RunEnd"] | null;
            health: components["schemas"]["HealthState"];
            /** @description Jobs with workers first, then the newest. */
            jobs: components["schemas"]["Page_OverviewJob_"];
            /** Num Jobs */
            num_jobs: number;
            /** Num Sessions */
            num_sessions: number;
            /** Num Suspects */
            num_suspects: number;
            /** Num Workers */
            num_workers: number;
            /**
             * Requests Per S
             * @description Over the last 10 seconds.
             */
            requests_per_s: number;
            /** Version */
            version: string;
            /** Workers By State */
            workers_by_state: {
                [key: string]: number;
            };
        };
        /** OverviewJob */
        OverviewJob: {
            /**
             * Attempt
             * @description Number of earlier starts of the run's workers, if known.
             */
            attempt: number | null;
            /**
             * Checkpoint Age S
             * @description Seconds since the last checkpoint was committed.
             */
            checkpoint_age_s: number | null;
            /** Checkpoint Id */
            checkpoint_id: string | null;
            /** Checkpoint Step */
            checkpoint_step: number | null;
            /**
             * Data Fraction
             * @description Shards done in this epoch, of all datasets; null without one.
             */
            data_fraction: number | null;
            /** Epoch */
            epoch: number | null;
            /** Generation */
            generation: number;
            health: components["schemas"]["HealthState"];
            /** Job Id */
            job_id: string;
            /**
             * Num Servers
             * @description Parameter servers; they are not counted as workers.
             */
            num_servers: number;
            /** Num Suspects */
            num_suspects: number;
            /**
             * Num Values
             * @description The number of series; /api/series lists them.
             */
            num_values: number;
            /** Num Workers */
            num_workers: number;
            /**
             * Reason
             * @description Why this generation started.
             */
            reason: string;
            /** Rows Per S */
            rows_per_s: number | null;
            /**
             * State
             * @enum {string}
             */
            state: "waiting" | "starting" | "loading" | "training" | "saving" | "recovering" | "idle" | "error";
            /**
             * Step
             * @description The lowest step of all ranks; null without workers.
             */
            step: number | null;
            /** Steps Per S */
            steps_per_s: number | null;
            /**
             * Values
             * @description The newest values of its series; at most 24.
             */
            values: {
                [key: string]: components["schemas"]["SeriesValue"];
            };
            /** Workers By State */
            workers_by_state: {
                [key: string]: number;
            };
        };
        /** Page[Barrier] */
        Page_Barrier_: {
            /** Items */
            items: components["schemas"]["Barrier"][];
            /** Limit */
            limit: number;
            /**
             * Next Offset
             * @description The offset of the next page; null on the last page.
             */
            next_offset: number | null;
            /** Offset */
            offset: number;
            /**
             * Total
             * @description The number of matching items on all pages.
             */
            total: number;
        };
        /** Page[CheckpointLine] */
        Page_CheckpointLine_: {
            /** Items */
            items: components["schemas"]["CheckpointLine"][];
            /** Limit */
            limit: number;
            /**
             * Next Offset
             * @description The offset of the next page; null on the last page.
             */
            next_offset: number | null;
            /** Offset */
            offset: number;
            /**
             * Total
             * @description The number of matching items on all pages.
             */
            total: number;
        };
        /** Page[Checkpoint] */
        Page_Checkpoint_: {
            /** Items */
            items: components["schemas"]["Checkpoint"][];
            /** Limit */
            limit: number;
            /**
             * Next Offset
             * @description The offset of the next page; null on the last page.
             */
            next_offset: number | null;
            /** Offset */
            offset: number;
            /**
             * Total
             * @description The number of matching items on all pages.
             */
            total: number;
        };
        /** Page[Dataset] */
        Page_Dataset_: {
            /** Items */
            items: components["schemas"]["Dataset"][];
            /** Limit */
            limit: number;
            /**
             * Next Offset
             * @description The offset of the next page; null on the last page.
             */
            next_offset: number | null;
            /** Offset */
            offset: number;
            /**
             * Total
             * @description The number of matching items on all pages.
             */
            total: number;
        };
        /** Page[Job] */
        Page_Job_: {
            /** Items */
            items: components["schemas"]["Job"][];
            /** Limit */
            limit: number;
            /**
             * Next Offset
             * @description The offset of the next page; null on the last page.
             */
            next_offset: number | null;
            /** Offset */
            offset: number;
            /**
             * Total
             * @description The number of matching items on all pages.
             */
            total: number;
        };
        /** Page[OverviewJob] */
        Page_OverviewJob_: {
            /** Items */
            items: components["schemas"]["OverviewJob"][];
            /** Limit */
            limit: number;
            /**
             * Next Offset
             * @description The offset of the next page; null on the last page.
             */
            next_offset: number | null;
            /** Offset */
            offset: number;
            /**
             * Total
             * @description The number of matching items on all pages.
             */
            total: number;
        };
        /** Page[SeriesInfo] */
        Page_SeriesInfo_: {
            /** Items */
            items: components["schemas"]["SeriesInfo"][];
            /** Limit */
            limit: number;
            /**
             * Next Offset
             * @description The offset of the next page; null on the last page.
             */
            next_offset: number | null;
            /** Offset */
            offset: number;
            /**
             * Total
             * @description The number of matching items on all pages.
             */
            total: number;
        };
        /** Page[Server] */
        Page_Server_: {
            /** Items */
            items: components["schemas"]["Server"][];
            /** Limit */
            limit: number;
            /**
             * Next Offset
             * @description The offset of the next page; null on the last page.
             */
            next_offset: number | null;
            /** Offset */
            offset: number;
            /**
             * Total
             * @description The number of matching items on all pages.
             */
            total: number;
        };
        /** Page[ShardOwner] */
        Page_ShardOwner_: {
            /** Items */
            items: components["schemas"]["ShardOwner"][];
            /** Limit */
            limit: number;
            /**
             * Next Offset
             * @description The offset of the next page; null on the last page.
             */
            next_offset: number | null;
            /** Offset */
            offset: number;
            /**
             * Total
             * @description The number of matching items on all pages.
             */
            total: number;
        };
        /** Page[StudyTrial] */
        Page_StudyTrial_: {
            /** Items */
            items: components["schemas"]["StudyTrial"][];
            /** Limit */
            limit: number;
            /**
             * Next Offset
             * @description The offset of the next page; null on the last page.
             */
            next_offset: number | null;
            /** Offset */
            offset: number;
            /**
             * Total
             * @description The number of matching items on all pages.
             */
            total: number;
        };
        /** Page[WorkerTime] */
        Page_WorkerTime_: {
            /** Items */
            items: components["schemas"]["WorkerTime"][];
            /** Limit */
            limit: number;
            /**
             * Next Offset
             * @description The offset of the next page; null on the last page.
             */
            next_offset: number | null;
            /** Offset */
            offset: number;
            /**
             * Total
             * @description The number of matching items on all pages.
             */
            total: number;
        };
        /** Page[Worker] */
        Page_Worker_: {
            /** Items */
            items: components["schemas"]["Worker"][];
            /** Limit */
            limit: number;
            /**
             * Next Offset
             * @description The offset of the next page; null on the last page.
             */
            next_offset: number | null;
            /** Offset */
            offset: number;
            /**
             * Total
             * @description The number of matching items on all pages.
             */
            total: number;
        };
        /** Points */
        Points: {
            /** At S */
            at_s: number;
            /**
             * Job Id
             * @description Empty for the coordinator.
             */
            job_id: string;
            /**
             * Values
             * @description Minimum, mean and maximum of each series.
             */
            values: {
                [key: string]: [
                    number,
                    number,
                    number
                ];
            };
        };
        /** Problem */
        Problem: {
            /**
             * Field
             * @description The invalid parameter; empty if it is no single one.
             */
            field: string;
            /**
             * Kind
             * @description The name of the error, the same as over gRPC.
             */
            kind: string;
            /**
             * Message
             * @description What is wrong, and how to fix it.
             */
            message: string;
        };
        /** RankDataWait */
        RankDataWait: {
            /**
             * Cause
             * @enum {string}
             */
            cause: "no_shards" | "all_ranks" | "some_ranks";
            /** Cure */
            cure: string;
            /** Rank */
            rank: number;
            /** Reason */
            reason: string;
            /**
             * Share
             * @description Of the last half minute, inside `next()` of the loader.
             */
            share: number;
            /** Worker Id */
            worker_id: string;
        };
        /** RankStraggler */
        RankStraggler: {
            /**
             * Cause
             * @enum {string}
             */
            cause: "data" | "compute" | "checkpoint";
            /**
             * Factor
             * @description Its own time, without waiting for others, as a multiple of the median.
             */
            factor: number;
            /** Line */
            line: string;
            /** Rank */
            rank: number;
            /** Since Step */
            since_step: number | null;
            /** Worker Id */
            worker_id: string;
        };
        /** Recoveries */
        Recoveries: {
            /**
             * Is Recorded
             * @description False if this coordinator has no timeline of the job.
             */
            is_recorded: boolean;
            /**
             * Items
             * @description The newest 200, newest first.
             */
            items: components["schemas"]["RunRecovery"][];
            /** Job Id */
            job_id: string;
            /** Num Recoveries */
            num_recoveries: number;
        };
        /** RecoveryMoment */
        RecoveryMoment: {
            /**
             * After S
             * @description Since the detection.
             */
            after_s: number | null;
            /**
             * At S
             * @description Null if it did not happen, or has not happened yet.
             */
            at_s: number | null;
            /**
             * Name
             * @enum {string}
             */
            name: "detected" | "generation" | "started" | "chosen" | "loaded" | "first_step";
        };
        /** Reset */
        Reset: {
            /** Cursor */
            cursor: string;
            /** Reason */
            reason: string;
        };
        /**
         * RunEnd
         * @description The end of a run that is over.
         */
        RunEnd: {
            /** Began At S */
            began_at_s: number;
            /**
             * Ended At S
             * @description The time of the last record in its directory.
             */
            ended_at_s: number;
            /**
             * Log Ranks
             * @description Ranks that have a log; at most 1,000.
             */
            log_ranks: number[];
            /**
             * Missing
             * @description What its directory does not have, and what is therefore not shown.
             */
            missing: string[];
            /** Num Restarts */
            num_restarts: number;
            /** Reason */
            reason: string;
            /**
             * State
             * @description done, failed, stopped, or interrupted: its agent was killed.
             */
            state: string;
            /** Step */
            step: number;
        };
        /** RunInfo */
        RunInfo: {
            /**
             * Live Page
             * @description On the page of a run that is over: where the run has its page if it was resumed, empty if it has none; null if it was not resumed.
             */
            live_page: string | null;
            /** Max Workers */
            max_workers: number;
            /**
             * May Command
             * @description Whether this session may stop and scale the run.
             */
            may_command: boolean;
            /** Min Workers */
            min_workers: number;
            /** Name */
            name: string;
            /**
             * Num Workers
             * @description Without parameter servers; null before the run has started.
             */
            num_workers: number | null;
        };
        /** RunRecovery */
        RunRecovery: {
            /**
             * Attempt
             * @description The attempt that followed; null if there was none.
             */
            attempt: number | null;
            /** Cause */
            cause: string;
            /** Failed Attempt */
            failed_attempt: number;
            /** First Step */
            first_step: number | null;
            /** Generation */
            generation: number | null;
            /**
             * Last Lines
             * @description The end of the log of the worker that failed first.
             */
            last_lines: string[];
            /** Moments */
            moments: components["schemas"]["RecoveryMoment"][];
            /** Rank */
            rank: number | null;
            /**
             * Step
             * @description Step of the checkpoint that was loaded; null for a start without one.
             */
            step: number | null;
            /**
             * Took S
             * @description From the detection to the first step.
             */
            took_s: number | null;
        };
        /** ScaleRequest */
        ScaleRequest: {
            /** Workers */
            workers: number;
        };
        /** SeriesInfo */
        SeriesInfo: {
            /** First At S */
            first_at_s: number;
            /**
             * Job Id
             * @description Empty for the coordinator.
             */
            job_id: string;
            last: components["schemas"]["SeriesValue"];
            /** Last At S */
            last_at_s: number;
            /** Name */
            name: string;
            /** Unit */
            unit: string;
        };
        /** SeriesPoints */
        SeriesPoints: {
            /**
             * Interval S
             * @description The length of a bucket; 0 if the series is empty.
             */
            interval_s: number;
            /** Max */
            max: number[];
            /** Mean */
            mean: number[];
            /** Min */
            min: number[];
            /** Name */
            name: string;
            /**
             * T
             * @description The start of each bucket. A gap is a time without values.
             */
            t: number[];
            /** Unit */
            unit: string;
        };
        /** SeriesValue */
        SeriesValue: {
            /** Max */
            max: number;
            /** Mean */
            mean: number;
            /** Min */
            min: number;
            /** Unit */
            unit: string;
        };
        /** Server */
        Server: {
            /**
             * Bytes
             * @description Memory of the tables.
             */
            bytes: number | null;
            /**
             * Evicted
             * @description Rows evicted since the server started.
             */
            evicted: number | null;
            /**
             * Hit Rate
             * @description Share of the pulled rows that were in memory; null without a file.
             */
            hit_rate: number | null;
            /** Number */
            number: number;
            /**
             * Pulls Per S
             * @description Over the last 10 seconds.
             */
            pulls_per_s: number | null;
            /** Pushes Per S */
            pushes_per_s: number | null;
            /** Rows */
            rows: number | null;
            /** Silent S */
            silent_s: number;
            /**
             * Staleness
             * @description Steps between the fastest and the slowest worker.
             */
            staleness: number | null;
            /**
             * Step
             * @description Steps that all workers have pushed.
             */
            step: number;
            /** Suspect */
            suspect: boolean;
            /** Worker Id */
            worker_id: string;
        };
        /**
         * ServerFigures
         * @description Null: not measured.
         */
        ServerFigures: {
            /**
             * Bytes
             * @description Memory of the tables.
             */
            bytes: number | null;
            /**
             * Evicted
             * @description Rows evicted since the server started.
             */
            evicted: number | null;
            /**
             * Hit Rate
             * @description Share of the pulled rows that were in memory; null without a file.
             */
            hit_rate: number | null;
            /**
             * Pulls Per S
             * @description Over the last 10 seconds.
             */
            pulls_per_s: number | null;
            /** Pushes Per S */
            pushes_per_s: number | null;
            /** Rows */
            rows: number | null;
            /**
             * Staleness
             * @description Steps between the fastest and the slowest worker.
             */
            staleness: number | null;
        };
        /** SessionInfo */
        SessionInfo: {
            /**
             * Csrf Header
             * @description Send this header with any value in requests that change something.
             */
            csrf_header: string;
            /**
             * Login Required
             * @description Whether the coordinator has tokens and the request has no valid one.
             */
            login_required: boolean;
            /**
             * Role
             * @description The role of the request; null if it must log in first.
             */
            role: ("reader" | "worker" | "admin") | null;
            /** Version */
            version: string;
        };
        /** ShardMove */
        ShardMove: {
            /** At S */
            at_s: number;
            /** Generation */
            generation: number;
            /** Num Moved */
            num_moved: number;
            /** Num Workers */
            num_workers: number;
            /**
             * Reason
             * @description Why the generation began; empty if it is not recorded any more.
             */
            reason: string;
        };
        /** ShardOwner */
        ShardOwner: {
            /**
             * Cells
             * @description Finished shards of each cell, in the order of reading.
             */
            cells: number[];
            /**
             * Num Done
             * @description Finished in this epoch.
             */
            num_done: number;
            /**
             * Num Gained
             * @description Shards that the last move gave it; null without a recorded move.
             */
            num_gained: number | null;
            /** Num Shards */
            num_shards: number;
            /** Rank */
            rank: number | null;
            /**
             * Worker Id
             * @description Null: these shards wait for a worker.
             */
            worker_id: string | null;
        };
        /** StacksRequest */
        StacksRequest: {
            /**
             * Rank
             * @description The rank that the launcher gave the worker.
             */
            rank: number;
        };
        /** Status */
        Status: {
            /**
             * Jobs
             * @description The first 1,000; /api/jobs lists them all.
             */
            jobs: components["schemas"]["StatusJob"][];
            /**
             * Journal Bytes
             * @description The size of the journal; null if it did not respond in time.
             */
            journal_bytes: number | null;
            /**
             * Journal Damage
             * @description Damage found at startup.
             */
            journal_damage: string | null;
            /**
             * Journal Failure
             * @description Why the journal cannot be written at present.
             */
            journal_failure: string | null;
            /** Num Jobs */
            num_jobs: number;
            /** Num Sessions */
            num_sessions: number;
            /** Num Workers */
            num_workers: number;
            /**
             * Requests Per S
             * @description Over the last 10 seconds.
             */
            requests_per_s: number;
            /**
             * Token File Problem
             * @description Why the newest token file is not used.
             */
            token_file_problem: string | null;
            /** Version */
            version: string;
        };
        /** StatusJob */
        StatusJob: {
            /** Generation */
            generation: number;
            /** Job Id */
            job_id: string;
            /** Num Datasets */
            num_datasets: number;
            /** Num Open Barriers */
            num_open_barriers: number;
            /** Num Workers */
            num_workers: number;
        };
        /** StopRequest */
        StopRequest: {
            /**
             * Is Now
             * @description Without saving a checkpoint first.
             * @default false
             */
            is_now: boolean;
        };
        /** StudyAxis */
        StudyAxis: {
            /** High */
            high: string;
            /**
             * Labels
             * @description All values, if there are few; they divide the axis into equal parts.
             */
            labels: string[];
            /**
             * Low
             * @description The value at the lower end, in words.
             */
            low: string;
            /** Name */
            name: string;
        };
        /** StudyCurve */
        StudyCurve: {
            /**
             * State
             * @enum {string}
             */
            state: "queued" | "running" | "paused" | "finished" | "pruned" | "failed";
            /** Steps */
            steps: number[];
            /** Trial */
            trial: number;
            /** Values */
            values: (number | null)[];
        };
        /** StudyCurves */
        StudyCurves: {
            /**
             * Items
             * @description Thinned; the smallest and largest values are kept.
             */
            items: components["schemas"]["StudyCurve"][];
            /** Metric */
            metric: string;
            /**
             * Num Trials
             * @description Trials that have reported, of which the items are a choice.
             */
            num_trials: number;
            /** Version */
            version: string;
        };
        /** StudyHistory */
        StudyHistory: {
            /**
             * Best
             * @description Each improvement by a trial that meets all constraints.
             */
            best: components["schemas"]["StudyResult"][];
            /** Direction */
            direction: string;
            /** Metric */
            metric: string;
            /** Num Ended */
            num_ended: number;
            /**
             * Results
             * @description Results of finished trials, thinned.
             */
            results: components["schemas"]["StudyResult"][];
            /** Version */
            version: string;
        };
        /** StudyImportance */
        StudyImportance: {
            /**
             * Importance
             * @description Share of the whole; all of them add up to 1.
             */
            importance: number;
            /** Name */
            name: string;
        };
        /** StudyImportances */
        StudyImportances: {
            /**
             * Items
             * @description The largest first.
             */
            items: components["schemas"]["StudyImportance"][];
            /**
             * Num Trials
             * @description Finished trials from which they were computed.
             */
            num_trials: number;
            /**
             * Problem
             * @description Why there are none; empty if there are.
             */
            problem: string;
        };
        /** StudyInfo */
        StudyInfo: {
            /** Active S */
            active_s: number;
            /** Began At S */
            began_at_s: number | null;
            best: components["schemas"]["StudyTrial"] | null;
            /** Constraints */
            constraints: string[];
            /** Counts */
            counts: {
                [key: string]: number;
            };
            /** Directions */
            directions: string[];
            /** Is Running */
            is_running: boolean;
            /**
             * Left S
             * @description Estimate; null if it does not run, or nothing is known yet.
             */
            left_s: number | null;
            /**
             * May Command
             * @description Whether this session may stop trials and let them start again.
             */
            may_command: boolean;
            /**
             * Metrics
             * @description The objectives.
             */
            metrics: string[];
            /** Mode */
            mode: string;
            /** Name */
            name: string;
            /**
             * Num Best
             * @description Trials on the Pareto front; with one objective, at most 1.
             */
            num_best: number;
            /**
             * Num Known
             * @description Trials of other studies that a warm start has used.
             */
            num_known: number;
            /** Num Slots */
            num_slots: number;
            /**
             * Num Trials
             * @description Trials that the study may have.
             */
            num_trials: number;
            /** Parameters */
            parameters: components["schemas"]["StudyParameter"][];
            /** Path */
            path: string;
            /**
             * Reason
             * @description Why it has ended, or is being stopped.
             */
            reason: string;
            /**
             * Reported
             * @description The objectives and the metrics in constraints.
             */
            reported: string[];
            /** Seed */
            seed: number;
            /**
             * State
             * @description State of its driver: running, done, stopped, failed, interrupted, …
             */
            state: string;
            /** Study */
            study: string;
            /** Updated At S */
            updated_at_s: number;
            /**
             * Version
             * @description Changes with every fact of the journal.
             */
            version: string;
        };
        /** StudyLine */
        StudyLine: {
            /**
             * Positions
             * @description From 0 to 1 on each axis; null where the parameter does not apply.
             */
            positions: (number | null)[];
            /** Trial */
            trial: number;
            /** Value */
            value: number;
        };
        /** StudyList */
        StudyList: {
            /** Items */
            items: components["schemas"]["StudyRef"][];
        };
        /** StudyParallel */
        StudyParallel: {
            /** Axes */
            axes: components["schemas"]["StudyAxis"][];
            /** Direction */
            direction: string;
            /**
             * Items
             * @description Finished trials, the best ones and a choice of the others.
             */
            items: components["schemas"]["StudyLine"][];
            /** Metric */
            metric: string;
            /**
             * Num Axes
             * @description Parameters that can vary, of which the axes are the first.
             */
            num_axes: number;
            /** Num Trials */
            num_trials: number;
            /** Version */
            version: string;
        };
        /** StudyParameter */
        StudyParameter: {
            /**
             * Allowed
             * @description The allowed values in words.
             */
            allowed: string;
            /** Is Log */
            is_log: boolean;
            /**
             * Kind
             * @enum {string}
             */
            kind: "float" | "int" | "categorical" | "bool" | "fixed";
            /** Name */
            name: string;
        };
        /** StudyPareto */
        StudyPareto: {
            /** Items */
            items: components["schemas"]["StudyPoint"][];
            /** Num Trials */
            num_trials: number;
            /** Version */
            version: string;
            /** X */
            x: string;
            /** Y */
            y: string;
        };
        /** StudyPoint */
        StudyPoint: {
            /**
             * Is Best
             * @description No other trial dominates it in all objectives.
             */
            is_best: boolean;
            /** Trial */
            trial: number;
            /** X */
            x: number;
            /** Y */
            y: number;
        };
        /** StudyRef */
        StudyRef: {
            /** Name */
            name: string;
            /**
             * Study
             * @description Its id, for the other requests.
             */
            study: string;
        };
        /** StudyResult */
        StudyResult: {
            /**
             * Num Ended
             * @description Number of trials that had ended with this one.
             */
            num_ended: number;
            /** Trial */
            trial: number;
            /** Value */
            value: number;
        };
        /** StudyTrial */
        StudyTrial: {
            /** Checkpoint */
            checkpoint: string;
            /** Checkpoint Step */
            checkpoint_step: number;
            /** Config */
            config: {
                [key: string]: boolean | number | string | null;
            };
            /**
             * Donors
             * @description Trials whose checkpoints it has continued from.
             */
            donors: number[];
            /**
             * Duration S
             * @description From its first start to its end, or to now.
             */
            duration_s: number | null;
            /** Ended At S */
            ended_at_s: number | null;
            /**
             * Is Best
             * @description The best finished trial; with several objectives, one on the Pareto front.
             */
            is_best: boolean;
            /**
             * Is Feasible
             * @description Whether its last values meet all constraints.
             */
            is_feasible: boolean;
            /** Num Slots */
            num_slots: number;
            /** Num Starts */
            num_starts: number;
            /** Number */
            number: number;
            /**
             * Reason
             * @description Why it was stopped, paused, queued again or failed.
             */
            reason: string;
            /** Slot */
            slot: number | null;
            /** Started At S */
            started_at_s: number | null;
            /**
             * State
             * @enum {string}
             */
            state: "queued" | "running" | "paused" | "finished" | "pruned" | "failed";
            /**
             * Step
             * @description The last step that was reported.
             */
            step: number | null;
            /**
             * Values
             * @description Last values of the objectives and of the metrics in constraints; empty without a report. Null if not a finite number.
             */
            values: {
                [key: string]: number | null;
            };
        };
        /** TrialOrderRequest */
        TrialOrderRequest: {
            /**
             * Number
             * @description The trial.
             */
            number: number;
            /**
             * Study
             * @description Id of the study; the first one by default.
             * @default
             */
            study: string;
        };
        /** Worker */
        Worker: {
            /**
             * Attempt
             * @description Number of earlier starts of the run's workers, if known.
             */
            attempt?: number | null;
            /** Capacity */
            capacity: number;
            /** Epoch */
            epoch: number;
            /** Hostname */
            hostname: string;
            /** Incarnation */
            incarnation: number;
            /** Job Id */
            job_id: string;
            /**
             * Launch Rank
             * @description Rank that the launcher gave the process, if any.
             */
            launch_rank?: number | null;
            /**
             * Metrics
             * @description The newest value of each; null if it is not finite.
             */
            metrics: {
                [key: string]: number | null;
            };
            /** Rank */
            rank: number;
            /**
             * Silent S
             * @description Seconds since its last message.
             */
            silent_s: number;
            /**
             * State
             * @enum {string}
             */
            state: "INITIALIZING" | "IDLE" | "LOADING_DATA" | "TRAINING" | "CHECKPOINTING" | "RECOVERING" | "ERROR";
            /** Step */
            step: number;
            /**
             * Suspect
             * @description It lost its connection and has not reconnected.
             */
            suspect: boolean;
            /** Worker Id */
            worker_id: string;
        };
        /** WorkerChange */
        WorkerChange: {
            /** Attempt */
            attempt: number | null;
            /** Epoch */
            epoch: number;
            /** Incarnation */
            incarnation: number;
            /** Rank */
            rank: number;
            /** Silent S */
            silent_s: number;
            /**
             * State
             * @enum {string}
             */
            state: "INITIALIZING" | "IDLE" | "LOADING_DATA" | "TRAINING" | "CHECKPOINTING" | "RECOVERING" | "ERROR";
            /** Step */
            step: number;
            /** Suspect */
            suspect: boolean;
            /** Worker Id */
            worker_id: string;
        };
        /** WorkerLog */
        WorkerLog: {
            /** Attempt */
            attempt: number;
            /**
             * Attempts
             * @description Attempts of which this rank has a log, oldest first.
             */
            attempts: number[];
            /**
             * Lines
             * @description The end of the log, without control characters.
             */
            lines: string[];
            /** Rank */
            rank: number;
        };
        /**
         * WorkerTime
         * @description Shares of the time between two reports; those of a moment add up to 1. The lists have one entry per report.
         */
        WorkerTime: {
            /**
             * Blocked
             * @description For other ranks: at barriers and in collectives, if these are measured.
             */
            blocked: number[];
            /** Computing */
            computing: number[];
            /**
             * Ended At S
             * @description Seconds since 1970, oldest first.
             */
            ended_at_s: number[];
            /** Incarnation */
            incarnation: number;
            /**
             * Is Collective Known
             * @description False: waits in collectives of torch are part of computing.
             */
            is_collective_known: boolean;
            /** Rank */
            rank: number;
            /**
             * Waiting
             * @description For data, in saves, and loading a checkpoint.
             */
            waiting: number[];
            /** Worker Id */
            worker_id: string;
        };
        /** WorkersChanged */
        WorkersChanged: {
            /** At S */
            at_s: number;
            /** Changed */
            changed: components["schemas"]["WorkerChange"][];
            /**
             * Gone
             * @description Workers that left.
             */
            gone: string[];
            /**
             * Is Complete
             * @description False if more workers changed than fit: load /api/workers again.
             */
            is_complete: boolean;
            /** Job Id */
            job_id: string;
        };
    };
    responses: never;
    parameters: never;
    requestBodies: never;
    headers: never;
    pathItems: never;
}
export type $defs = Record<string, never>;
export interface operations {
    barriers_api_barriers_get: {
        parameters: {
            query?: {
                /** @description Only this job. */
                job?: string | null;
                state?: ("open" | "released") | null;
                /** @description The maximum number of items. */
                limit?: number;
                /** @description The number of items to skip. */
                offset?: number;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Page_Barrier_"];
                };
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    checkpoints_api_checkpoints_get: {
        parameters: {
            query?: {
                /** @description Only this job. */
                job?: string | null;
                state?: ("committed" | "open") | null;
                kind?: ("FULL" | "INCREMENTAL" | "OPTIMIZER_ONLY" | "MODEL_ONLY") | null;
                /** @description The maximum number of items. */
                limit?: number;
                /** @description The number of items to skip. */
                offset?: number;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Page_Checkpoint_"];
                };
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    data_api_data_get: {
        parameters: {
            query: {
                /** @description The job. */
                job: string;
                /** @description The dataset; by default the first unfinished one. */
                dataset?: string;
                /** @description The maximum number of owners. */
                limit?: number;
                /** @description The number of owners to skip. */
                offset?: number;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["JobData"];
                };
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    datasets_api_datasets_get: {
        parameters: {
            query?: {
                /** @description Only this job. */
                job?: string | null;
                complete?: boolean | null;
                /** @description The maximum number of items. */
                limit?: number;
                /** @description The number of items to skip. */
                offset?: number;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Page_Dataset_"];
                };
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    events_api_events_get: {
        parameters: {
            query?: {
                /** @description Only this job. */
                job?: string | null;
                kind?: ("WorkerJoined" | "WorkerLeft" | "GenerationStarted" | "DatasetRegistered" | "ShardsAssigned" | "ShardsDone" | "EpochAdvanced" | "BarrierReleased" | "CheckpointAcked" | "CheckpointCommitted" | "CheckpointAborted" | "CommandSent" | "CommandsAcked" | "NumbersSkipped" | "JobDropped") | null;
                /** @description Only this worker. */
                worker?: string | null;
                /** @description Start after this entry. */
                after?: number;
                /** @description The maximum number of items. */
                limit?: number;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["EventPage"];
                };
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    goodput_api_goodput_get: {
        parameters: {
            query: {
                /** @description The job. */
                job: string;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Goodput"];
                };
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    health_api_health_get: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Health"];
                };
            };
            /** @description Service Unavailable */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Health"];
                };
            };
        };
    };
    history_api_history_get: {
        parameters: {
            query: {
                /** @description The series; repeat it for several. */
                name: string[];
                /** @description The job; empty for the coordinator itself. */
                job?: string;
                /** @description Seconds since 1970. */
                since_s?: number;
                /** @description Seconds since 1970. */
                until_s?: number;
                /** @description The maximum number of points of a series. */
                max_points?: number;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["History"];
                };
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    jobs_api_jobs_get: {
        parameters: {
            query?: {
                /** @description Only this job. */
                job?: string | null;
                /** @description The maximum number of items. */
                limit?: number;
                /** @description The number of items to skip. */
                offset?: number;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Page_Job_"];
                };
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    lineage_api_lineage_get: {
        parameters: {
            query: {
                /** @description The job. */
                job: string;
                /** @description The maximum number of checkpoints. */
                limit?: number;
                /** @description The number of checkpoints to skip. */
                offset?: number;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["JobLineage"];
                };
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    live_api_live_get: {
        parameters: {
            query?: {
                /** @description The last message that the client has; empty to start now. */
                cursor?: string;
            };
            header?: {
                /** @description The same, sent by browsers that reconnect. */
                "last-event-id"?: string;
            };
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A stream of server-sent events. The model lists the data of each event by its name; no event contains all. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["LiveEvents"];
                    "text/event-stream": unknown;
                };
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    login_api_login_post: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": {
                    /**
                     * Token
                     * Format: password
                     */
                    token: string;
                };
            };
        };
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["LoginAnswer"];
                };
            };
            /** @description The token is unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The header x-strata-request is missing, or the page is of another site. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The body is not a token, or no login is needed. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description Too many requests per second, or the body is too large. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    logout_api_logout_post: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
            /** @description The header x-strata-request is missing, or the page is of another site. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    overview_api_overview_get: {
        parameters: {
            query?: {
                /** @description The maximum number of jobs. */
                limit?: number;
                /** @description The number of items to skip. */
                offset?: number;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Overview"];
                };
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    recoveries_api_recoveries_get: {
        parameters: {
            query: {
                /** @description The job. */
                job: string;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Recoveries"];
                };
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    info_api_run_get: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["RunInfo"] | null;
                };
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    log_api_run_log_get: {
        parameters: {
            query: {
                /** @description The rank that the launcher gave the worker. */
                rank: number;
                /** @description The attempt; the newest by default. */
                attempt?: number | null;
                /** @description The maximum number of lines, from the end. */
                lines?: number;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["WorkerLog"];
                };
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    scale_api_run_scale_post: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["ScaleRequest"];
            };
        };
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    stacks_api_run_stacks_post: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["StacksRequest"];
            };
        };
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    stop_api_run_stop_post: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["StopRequest"];
            };
        };
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    series_api_series_get: {
        parameters: {
            query?: {
                /** @description Only this job; empty for the coordinator. */
                job?: string | null;
                /** @description The maximum number of series. */
                limit?: number;
                /** @description The number of items to skip. */
                offset?: number;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Page_SeriesInfo_"];
                };
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    servers_api_servers_get: {
        parameters: {
            query: {
                /** @description The job. */
                job: string;
                /** @description The maximum number of servers. */
                limit?: number;
                /** @description The number of servers to skip. */
                offset?: number;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["JobServers"];
                };
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    session_api_session_get: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SessionInfo"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    status_api_status_get: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Status"];
                };
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    all_studies_api_studies_get: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["StudyList"];
                };
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    study_info_api_study_get: {
        parameters: {
            query?: {
                /** @description Id of the study; the first one by default. */
                study?: string;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["StudyInfo"];
                };
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    curves_api_study_curves_get: {
        parameters: {
            query?: {
                /** @description Id of the study; the first one by default. */
                study?: string;
                /** @description A reported metric; the first objective by default. */
                metric?: string;
                /** @description Trials to include in any case. */
                trial?: number[];
                /** @description The maximum number of trials. */
                max_trials?: number;
                /** @description The maximum number of points of a curve. */
                max_points?: number;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["StudyCurves"];
                };
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    history_api_study_history_get: {
        parameters: {
            query?: {
                /** @description Id of the study; the first one by default. */
                study?: string;
                /** @description A reported metric; the first objective by default. */
                metric?: string;
                /** @description The maximum number of results. */
                max_points?: number;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["StudyHistory"];
                };
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    importances_api_study_importances_get: {
        parameters: {
            query?: {
                /** @description Id of the study; the first one by default. */
                study?: string;
                /** @description A reported metric; the first objective by default. */
                metric?: string;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["StudyImportances"];
                };
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    parallel_api_study_parallel_get: {
        parameters: {
            query?: {
                /** @description Id of the study; the first one by default. */
                study?: string;
                /** @description A reported metric; the first objective by default. */
                metric?: string;
                /** @description Trials to include in any case. */
                trial?: number[];
                /** @description The maximum number of trials. */
                max_trials?: number;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["StudyParallel"];
                };
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    pareto_api_study_pareto_get: {
        parameters: {
            query?: {
                /** @description Id of the study; the first one by default. */
                study?: string;
                /** @description A reported metric; the first objective by default. */
                x?: string;
                /** @description A reported metric; the first objective by default. */
                y?: string;
                /** @description The maximum number of results. */
                max_points?: number;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["StudyPareto"];
                };
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    trial_api_study_trial_get: {
        parameters: {
            query: {
                number: number;
                /** @description Id of the study; the first one by default. */
                study?: string;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["StudyTrial"] | null;
                };
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    requeue_api_study_trial_requeue_post: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["TrialOrderRequest"];
            };
        };
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    stop_api_study_trial_stop_post: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["TrialOrderRequest"];
            };
        };
        responses: {
            /** @description Successful Response */
            204: {
                headers: {
                    [name: string]: unknown;
                };
                content?: never;
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    trials_api_study_trials_get: {
        parameters: {
            query?: {
                /** @description Id of the study; the first one by default. */
                study?: string;
                /** @description Only trials in this state. */
                state?: ("queued" | "running" | "paused" | "finished" | "pruned" | "failed") | null;
                /** @description Only trials with this in their configuration or reason. */
                text?: string;
                /** @description What to sort by. */
                sort?: "trial" | "state" | "value" | "step" | "duration" | "config";
                /** @description The metric of `value`, or the parameter of `config`. */
                name?: string;
                /** @description Largest first. */
                desc?: boolean;
                /** @description The maximum number of trials. */
                limit?: number;
                /** @description The number of trials to skip. */
                offset?: number;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Page_StudyTrial_"];
                };
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    time_api_time_get: {
        parameters: {
            query: {
                /** @description The job. */
                job: string;
                /** @description The maximum number of workers. */
                limit?: number;
                /** @description The number of workers to skip. */
                offset?: number;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["JobTime"];
                };
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    workers_api_workers_get: {
        parameters: {
            query?: {
                /** @description Only this job. */
                job?: string | null;
                /** @description Only this worker. */
                worker?: string | null;
                state?: ("INITIALIZING" | "IDLE" | "LOADING_DATA" | "TRAINING" | "CHECKPOINTING" | "RECOVERING" | "ERROR") | null;
                suspect?: boolean | null;
                /** @description The maximum number of items. */
                limit?: number;
                /** @description The number of items to skip. */
                offset?: number;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Page_Worker_"];
                };
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
    metrics_metrics_get: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description Successful Response */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "text/plain": unknown;
                };
            };
            /** @description The token is missing or unknown. */
            401: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The role of the token does not permit the request. */
            403: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The job does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description A parameter is invalid. */
            422: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description More requests per second from this machine than limits.max_http_requests_per_s. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The journal cannot be read or written, or another coordinator leads. */
            503: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
        };
    };
}
