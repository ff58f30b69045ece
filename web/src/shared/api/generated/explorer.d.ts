// Generated from openapi/explorer.json by `npm run api`.
export interface paths {
    "/api/explorer/checkpoint": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Checkpoint
         * @description Return one checkpoint.
         */
        get: operations["checkpoint_api_explorer_checkpoint_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/explorer/checkpoints": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Checkpoints
         * @description List the checkpoints of a place, with their lineage.
         */
        get: operations["checkpoints_api_explorer_checkpoints_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/explorer/compare": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Compare
         * @description Rank the tensors that differ, the largest relative change first. Repeat until the scan is complete.
         */
        get: operations["compare_api_explorer_compare_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/explorer/compare/histogram": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Compare Histograms
         * @description Return the histograms of a tensor before and after, with the same bins.
         */
        get: operations["compare_histograms_api_explorer_compare_histogram_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/explorer/export": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Export
         * @description Download tensors as one safetensors file.
         */
        get: operations["export_api_explorer_export_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/explorer/follow": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Follow
         * @description Return one tensor in all checkpoints of a place, oldest first.
         */
        get: operations["follow_api_explorer_follow_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/explorer/heatmap": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Heat Map
         * @description Return the means of blocks of a tensor: its first dimension by all others.
         */
        get: operations["heat_map_api_explorer_heatmap_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/explorer/histogram": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Histogram
         * @description Return the histogram of a tensor, of all its elements or of those from `low` to `high`.
         */
        get: operations["histogram_api_explorer_histogram_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/explorer/places": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Places
         * @description List the places that can be explored.
         */
        get: operations["places_api_explorer_places_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/explorer/rows": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Rows
         * @description Return the norms of the rows of a tensor, and the rows that are dead or not finite.
         */
        get: operations["rows_api_explorer_rows_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/explorer/singular-values": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Singular Values
         * @description Return the singular values of a small matrix, largest first.
         */
        get: operations["singular_values_api_explorer_singular_values_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/explorer/statistics": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Statistics
         * @description Return a tensor with its statistics; compute them if they are not stored.
         */
        get: operations["statistics_api_explorer_statistics_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/explorer/tasks": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Tasks
         * @description List the verifications.
         */
        get: operations["tasks_api_explorer_tasks_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/explorer/tasks/{task}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Task
         * @description Return the progress of a verification.
         */
        get: operations["task_api_explorer_tasks__task__get"];
        put?: never;
        post?: never;
        /**
         * Cancel
         * @description Cancel a verification.
         */
        delete: operations["cancel_api_explorer_tasks__task__delete"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/explorer/tensors": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Tensors
         * @description Search tensors by name and property. Repeat the request until the scan is complete.
         */
        get: operations["tensors_api_explorer_tensors_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/explorer/tree": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Children
         * @description List the groups and tensors directly below a group.
         */
        get: operations["children_api_explorer_tree_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/explorer/values": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /**
         * Values
         * @description Return the elements of a box of a tensor.
         */
        get: operations["values_api_explorer_values_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/api/explorer/verify": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /**
         * Verify
         * @description Verify every byte of a checkpoint in the background.
         */
        post: operations["verify_api_explorer_verify_post"];
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
        /** CheckpointRef */
        CheckpointRef: {
            /** Id */
            id: string;
            /** Place */
            place: string;
        };
        /**
         * CheckpointType
         * @description Which part of the state a checkpoint holds.
         * @enum {string}
         */
        CheckpointType: "FULL" | "INCREMENTAL" | "OPTIMIZER_ONLY" | "MODEL_ONLY";
        /** ComparedHistogram */
        ComparedHistogram: {
            change: components["schemas"]["TensorChange"];
            /** Edges */
            edges: number[];
            /** Name */
            name: string;
            new: components["schemas"]["SideHistogram"];
            old: components["schemas"]["SideHistogram"];
            /** Read Bytes */
            read_bytes: number;
        };
        /** ComparedPage */
        ComparedPage: {
            /** Items */
            items: components["schemas"]["ComparedTensor"][];
            /** Limit */
            limit: number;
            new: components["schemas"]["CheckpointRef"];
            /**
             * Next Offset
             * @description The offset of the next page; null on the last page.
             */
            next_offset: number | null;
            /** Num Added */
            num_added: number;
            /** Num Changed */
            num_changed: number;
            /** Num Removed */
            num_removed: number;
            /** Num Reshaped */
            num_reshaped: number;
            /** Num Same */
            num_same: number;
            /** Offset */
            offset: number;
            old: components["schemas"]["CheckpointRef"];
            /** Same Structure */
            same_structure: boolean;
            scan: components["schemas"]["ScanState"];
            /**
             * Total
             * @description The number of matching items on all pages.
             */
            total: number;
        };
        /** ComparedTensor */
        ComparedTensor: {
            change: components["schemas"]["TensorChange"];
            /** Name */
            name: string;
            new: components["schemas"]["TensorSide"] | null;
            old: components["schemas"]["TensorSide"] | null;
        };
        /** ErrorBody */
        ErrorBody: {
            error: components["schemas"]["Problem"];
        };
        /** ExplorerCheckpoint */
        ExplorerCheckpoint: {
            /**
             * Bases
             * @description The checkpoints whose files it needs.
             */
            bases: string[];
            /**
             * Branch
             * @description How often training had gone back to an earlier step before.
             */
            branch: number;
            /**
             * Children
             * @description The checkpoints that are deltas against this one.
             */
            children: string[];
            /**
             * Created At S
             * @description Unix time.
             */
            created_at_s: number;
            /**
             * Duration S
             * @description How long the save took; null if it was not measured.
             */
            duration_s: number | null;
            /** Epoch */
            epoch: number | null;
            /**
             * Full Bytes
             * @description The size of the whole state.
             */
            full_bytes: number;
            /** Id */
            id: string;
            /**
             * Kind
             * @enum {string}
             */
            kind: "strata" | "safetensors";
            /**
             * Metadata
             * @description What the caller passed to `save`, or the metadata of the file.
             */
            metadata: {
                [key: string]: unknown;
            };
            /** Model Hash */
            model_hash: string;
            /** Num Ranks */
            num_ranks: number | null;
            /** Num Tensors */
            num_tensors: number;
            /**
             * Parent
             * @description The checkpoint that a delta was computed against; empty if there is none.
             */
            parent: string;
            /**
             * Size Bytes
             * @description The size of its own files.
             */
            size_bytes: number;
            /**
             * Stall S
             * @description How long the save blocked training on rank 0; null if not measured.
             */
            stall_s: number | null;
            /**
             * Step
             * @description Null for a plain safetensors file, like other fields that it does not have.
             */
            step: number | null;
            type: components["schemas"]["CheckpointType"] | null;
            /**
             * Why
             * @description Why the type is not the requested one; empty if it is.
             */
            why: string;
        };
        /** ExplorerCheckpointPage */
        ExplorerCheckpointPage: {
            /** Items */
            items: components["schemas"]["ExplorerCheckpoint"][];
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
             * Problems
             * @description Checkpoints that are ignored, and why.
             */
            problems: {
                [key: string]: string;
            };
            /**
             * Total
             * @description The number of matching items on all pages.
             */
            total: number;
        };
        /** ExplorerPlace */
        ExplorerPlace: {
            /**
             * Kind
             * @enum {string}
             */
            kind: "checkpoints" | "checkpoint" | "file";
            /** Label */
            label: string;
            /**
             * Location
             * @description The path or URL.
             */
            location: string;
            /**
             * Place
             * @description The id of the place in other requests.
             */
            place: string;
        };
        /** FollowedPage */
        FollowedPage: {
            /** Items */
            items: components["schemas"]["FollowedTensor"][];
            /** Limit */
            limit: number;
            /** Name */
            name: string;
            /**
             * Next Offset
             * @description The offset of the next page; null on the last page.
             */
            next_offset: number | null;
            /** Offset */
            offset: number;
            scan: components["schemas"]["ScanState"];
            /**
             * Total
             * @description The number of matching items on all pages.
             */
            total: number;
        };
        /** FollowedTensor */
        FollowedTensor: {
            /**
             * Changed
             * @description Whether it differs from the checkpoint before, by hashes.
             */
            changed: boolean | null;
            /** Created At S */
            created_at_s: number;
            /** Dtype */
            dtype: string | null;
            /** Epoch */
            epoch: number | null;
            /** Id */
            id: string;
            /** Is Present */
            is_present: boolean;
            /** Shape */
            shape: number[] | null;
            /**
             * Source
             * @description Where the statistics are from.
             * @enum {string}
             */
            source: "stored" | "computed" | "none";
            statistics: components["schemas"]["TensorStatistics"] | null;
            /** Step */
            step: number | null;
        };
        /** Page[TreeNode] */
        Page_TreeNode_: {
            /** Items */
            items: components["schemas"]["TreeNode"][];
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
        /** PlaceList */
        PlaceList: {
            /** Items */
            items: components["schemas"]["ExplorerPlace"][];
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
        /** ScanState */
        ScanState: {
            /**
             * Is Complete
             * @description If false, repeat the request: it continues where this one stopped.
             */
            is_complete: boolean;
            /** Num Done */
            num_done: number;
            /**
             * Num Needed
             * @description Tensors whose answer needs data.
             */
            num_needed: number;
            /**
             * Problems
             * @description Tensors that were skipped, and why.
             */
            problems: {
                [key: string]: string;
            };
            /**
             * Read Bytes
             * @description Bytes that this request read.
             */
            read_bytes: number;
        };
        /** SideHistogram */
        SideHistogram: {
            /** Counts */
            counts: number[];
            /** Num Elements */
            num_elements: number;
            /** Num Inf */
            num_inf: number;
            /** Num Nan */
            num_nan: number;
        };
        /** SingularValues */
        SingularValues: {
            /** Condition */
            condition: number | null;
            /** Effective Rank */
            effective_rank: number | null;
            /** Name */
            name: string;
            /** Num Columns */
            num_columns: number;
            /** Num Rows */
            num_rows: number;
            /** Read Bytes */
            read_bytes: number;
            /** Stable Rank */
            stable_rank: number | null;
            /**
             * Values
             * @description Largest first; null if one overflows.
             */
            values: (number | null)[];
        };
        /** TaskList */
        TaskList: {
            /** Items */
            items: components["schemas"]["VerifyTask"][];
        };
        /** Tensor */
        Tensor: {
            /** @description Null without `against`. */
            change: components["schemas"]["TensorChange"] | null;
            /** Dtype */
            dtype: string;
            /** Name */
            name: string;
            /** Num Bytes */
            num_bytes: number;
            /**
             * Num Dead Rows
             * @description Rows of zeros; null if not counted yet.
             */
            num_dead_rows: number | null;
            /** Num Elements */
            num_elements: number;
            /** Num Patches */
            num_patches: number;
            /** Num Slices */
            num_slices: number;
            /** Shape */
            shape: number[];
            /** @description Null if they are not stored and were not computed. */
            statistics: components["schemas"]["TensorStatistics"] | null;
        };
        /** TensorChange */
        TensorChange: {
            /**
             * At Least
             * @description A lower bound of relative_l2 from stored norms; null if unknown.
             */
            at_least: number | null;
            /** L2 */
            l2: number | null;
            /** Max Abs */
            max_abs: number | null;
            /**
             * Num Different
             * @description Null if not measured.
             */
            num_different: number | null;
            /** Num Not Finite */
            num_not_finite: number | null;
            /**
             * Relative L2
             * @description ‖new − old‖ / ‖old‖; null if not measured, or old is zero.
             */
            relative_l2: number | null;
            /**
             * State
             * @description `changed` until it is measured, if hashes cannot decide it.
             * @enum {string}
             */
            state: "changed" | "same" | "added" | "removed" | "reshaped";
        };
        /** TensorHeatMap */
        TensorHeatMap: {
            /** Column Edges */
            column_edges: number[];
            /** Max */
            max: number | null;
            /**
             * Means
             * @description Means of finite elements; null for a block without one.
             */
            means: (number | null)[][];
            /** Min */
            min: number | null;
            /** Name */
            name: string;
            /** Num Columns */
            num_columns: number;
            /** Num Not Finite */
            num_not_finite: number[][];
            /** Num Rows */
            num_rows: number;
            /** Read Bytes */
            read_bytes: number;
            /** Row Edges */
            row_edges: number[];
        };
        /** TensorHistogram */
        TensorHistogram: {
            /** Counts */
            counts: number[];
            /**
             * Edges
             * @description One more than counts; both are empty if no element is finite.
             */
            edges: number[];
            /** Name */
            name: string;
            /** Num Above */
            num_above: number;
            /** Num Below */
            num_below: number;
            /** Num Elements */
            num_elements: number;
            /** Num Inf */
            num_inf: number;
            /** Num Nan */
            num_nan: number;
            /**
             * Range From
             * @enum {string}
             */
            range_from: "statistics" | "data" | "request";
            /** Read Bytes */
            read_bytes: number;
        };
        /** TensorPage */
        TensorPage: {
            /** Items */
            items: components["schemas"]["Tensor"][];
            /** Limit */
            limit: number;
            /**
             * Next Offset
             * @description The offset of the next page; null on the last page.
             */
            next_offset: number | null;
            /** Offset */
            offset: number;
            scan: components["schemas"]["ScanState"];
            /**
             * Total
             * @description The number of matching items on all pages.
             */
            total: number;
        };
        /** TensorRows */
        TensorRows: {
            /**
             * Dead
             * @description The first dead rows, 100 at most, as of the others.
             */
            dead: number[];
            /** Name */
            name: string;
            /** Norm Max */
            norm_max: (number | null)[];
            /** Norm Mean */
            norm_mean: (number | null)[];
            /** Norm Min */
            norm_min: (number | null)[];
            /** Num Dead */
            num_dead: number;
            /** Num Rows */
            num_rows: number;
            /** Num With Inf */
            num_with_inf: number;
            /** Num With Nan */
            num_with_nan: number;
            /** Read Bytes */
            read_bytes: number;
            /** Row Edges */
            row_edges: number[];
            /** With Inf */
            with_inf: number[];
            /** With Nan */
            with_nan: number[];
        };
        /** TensorSide */
        TensorSide: {
            /** Dtype */
            dtype: string;
            /** Shape */
            shape: number[];
            statistics: components["schemas"]["TensorStatistics"] | null;
        };
        /** TensorStatistics */
        TensorStatistics: {
            /** Max */
            max: number | null;
            /** Mean */
            mean: number | null;
            /**
             * Min
             * @description Of finite elements; null if there is none.
             */
            min: number | null;
            /**
             * Norm
             * @description The Euclidean norm; null if it overflows.
             */
            norm: number | null;
            /** Num Elements */
            num_elements: number;
            /** Num Inf */
            num_inf: number;
            /** Num Nan */
            num_nan: number;
            /** Std */
            std: number | null;
        };
        /** TensorValues */
        TensorValues: {
            /** Name */
            name: string;
            /** Read Bytes */
            read_bytes: number;
            /** Shape */
            shape: number[];
            /** Start */
            start: number[];
            /**
             * Values
             * @description Row-major; text if a JSON number is not exact.
             */
            values: (boolean | number | string)[];
        };
        /** TreeNode */
        TreeNode: {
            /**
             * Kind
             * @enum {string}
             */
            kind: "group" | "tensor";
            /** Label */
            label: string;
            /** Num Bytes */
            num_bytes: number;
            /** Num Elements */
            num_elements: number;
            /** Num Inf */
            num_inf: number | null;
            /** Num Nan */
            num_nan: number | null;
            /** Num Tensors */
            num_tensors: number;
            /** Path */
            path: string;
            tensor: components["schemas"]["Tensor"] | null;
        };
        /** VerifyRequest */
        VerifyRequest: {
            /** Id */
            id: string;
            /** Place */
            place: string;
        };
        /** VerifyTask */
        VerifyTask: {
            /** Done Bytes */
            done_bytes: number;
            /** Ended At S */
            ended_at_s: number | null;
            /** Id */
            id: string;
            /**
             * Kind
             * @constant
             */
            kind: "verify";
            /** Place */
            place: string;
            /**
             * Problem
             * @description What is damaged, with the file and the tensor; empty if nothing is.
             */
            problem: string;
            /** Started At S */
            started_at_s: number;
            /**
             * State
             * @description `done`: every byte is intact.
             * @enum {string}
             */
            state: "running" | "done" | "failed" | "cancelled";
            /** Task */
            task: string;
            /** Total Bytes */
            total_bytes: number;
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
    checkpoint_api_explorer_checkpoint_get: {
        parameters: {
            query: {
                /** @description The id of a place. */
                place: string;
                /** @description The id of a checkpoint, or a file. */
                id: string;
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
                    "application/json": components["schemas"]["ExplorerCheckpoint"];
                };
            };
            /** @description The place, the checkpoint or the tensor does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The checkpoint is damaged or incomplete; the message names the file and the tensor. */
            409: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description Reading it would exceed a limit of bytes or time; the message names the limit. */
            413: {
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
            /** @description Too many requests wait for a read. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The store does not answer. */
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
    checkpoints_api_explorer_checkpoints_get: {
        parameters: {
            query: {
                /** @description The id of a place. */
                place: string;
                /** @description Which comes first. */
                order?: string;
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
                    "application/json": components["schemas"]["ExplorerCheckpointPage"];
                };
            };
            /** @description The place, the checkpoint or the tensor does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The checkpoint is damaged or incomplete; the message names the file and the tensor. */
            409: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description Reading it would exceed a limit of bytes or time; the message names the limit. */
            413: {
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
            /** @description Too many requests wait for a read. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The store does not answer. */
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
    compare_api_explorer_compare_get: {
        parameters: {
            query: {
                /** @description The id of a place. */
                place: string;
                /** @description The id of a checkpoint, or a file. */
                id: string;
                /** @description The older checkpoint. */
                against: string;
                /** @description The place of `against`; by default the same. */
                against_place?: string | null;
                /** @description A part of the name, or a pattern with * and ?. */
                search?: string;
                include_same?: boolean;
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
                    "application/json": components["schemas"]["ComparedPage"];
                };
            };
            /** @description The place, the checkpoint or the tensor does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The checkpoint is damaged or incomplete; the message names the file and the tensor. */
            409: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description Reading it would exceed a limit of bytes or time; the message names the limit. */
            413: {
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
            /** @description Too many requests wait for a read. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The store does not answer. */
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
    compare_histograms_api_explorer_compare_histogram_get: {
        parameters: {
            query: {
                /** @description The id of a place. */
                place: string;
                /** @description The id of a checkpoint, or a file. */
                id: string;
                /** @description The full name of a tensor. */
                name: string;
                /** @description The older checkpoint. */
                against: string;
                /** @description The place of `against`; by default the same. */
                against_place?: string | null;
                bins?: number;
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
                    "application/json": components["schemas"]["ComparedHistogram"];
                };
            };
            /** @description The place, the checkpoint or the tensor does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The checkpoint is damaged or incomplete; the message names the file and the tensor. */
            409: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description Reading it would exceed a limit of bytes or time; the message names the limit. */
            413: {
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
            /** @description Too many requests wait for a read. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The store does not answer. */
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
    export_api_explorer_export_get: {
        parameters: {
            query: {
                /** @description The id of a place. */
                place: string;
                /** @description The id of a checkpoint, or a file. */
                id: string;
                /** @description Patterns such as model.* */
                only?: string[] | null;
                strip_prefix?: string;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            /** @description A safetensors file. */
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/octet-stream": unknown;
                };
            };
            /** @description The place, the checkpoint or the tensor does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The checkpoint is damaged or incomplete; the message names the file and the tensor. */
            409: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description Reading it would exceed a limit of bytes or time; the message names the limit. */
            413: {
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
            /** @description Too many requests wait for a read. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The store does not answer. */
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
    follow_api_explorer_follow_get: {
        parameters: {
            query: {
                /** @description The id of a place. */
                place: string;
                /** @description The full name of a tensor. */
                name: string;
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
                    "application/json": components["schemas"]["FollowedPage"];
                };
            };
            /** @description The place, the checkpoint or the tensor does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The checkpoint is damaged or incomplete; the message names the file and the tensor. */
            409: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description Reading it would exceed a limit of bytes or time; the message names the limit. */
            413: {
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
            /** @description Too many requests wait for a read. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The store does not answer. */
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
    heat_map_api_explorer_heatmap_get: {
        parameters: {
            query: {
                /** @description The id of a place. */
                place: string;
                /** @description The id of a checkpoint, or a file. */
                id: string;
                /** @description The full name of a tensor. */
                name: string;
                rows?: number;
                columns?: number;
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
                    "application/json": components["schemas"]["TensorHeatMap"];
                };
            };
            /** @description The place, the checkpoint or the tensor does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The checkpoint is damaged or incomplete; the message names the file and the tensor. */
            409: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description Reading it would exceed a limit of bytes or time; the message names the limit. */
            413: {
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
            /** @description Too many requests wait for a read. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The store does not answer. */
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
    histogram_api_explorer_histogram_get: {
        parameters: {
            query: {
                /** @description The id of a place. */
                place: string;
                /** @description The id of a checkpoint, or a file. */
                id: string;
                /** @description The full name of a tensor. */
                name: string;
                bins?: number;
                low?: number | null;
                high?: number | null;
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
                    "application/json": components["schemas"]["TensorHistogram"];
                };
            };
            /** @description The place, the checkpoint or the tensor does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The checkpoint is damaged or incomplete; the message names the file and the tensor. */
            409: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description Reading it would exceed a limit of bytes or time; the message names the limit. */
            413: {
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
            /** @description Too many requests wait for a read. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The store does not answer. */
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
    places_api_explorer_places_get: {
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
                    "application/json": components["schemas"]["PlaceList"];
                };
            };
            /** @description The place, the checkpoint or the tensor does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The checkpoint is damaged or incomplete; the message names the file and the tensor. */
            409: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description Reading it would exceed a limit of bytes or time; the message names the limit. */
            413: {
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
            /** @description Too many requests wait for a read. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The store does not answer. */
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
    rows_api_explorer_rows_get: {
        parameters: {
            query: {
                /** @description The id of a place. */
                place: string;
                /** @description The id of a checkpoint, or a file. */
                id: string;
                /** @description The full name of a tensor. */
                name: string;
                points?: number;
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
                    "application/json": components["schemas"]["TensorRows"];
                };
            };
            /** @description The place, the checkpoint or the tensor does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The checkpoint is damaged or incomplete; the message names the file and the tensor. */
            409: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description Reading it would exceed a limit of bytes or time; the message names the limit. */
            413: {
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
            /** @description Too many requests wait for a read. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The store does not answer. */
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
    singular_values_api_explorer_singular_values_get: {
        parameters: {
            query: {
                /** @description The id of a place. */
                place: string;
                /** @description The id of a checkpoint, or a file. */
                id: string;
                /** @description The full name of a tensor. */
                name: string;
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
                    "application/json": components["schemas"]["SingularValues"];
                };
            };
            /** @description The place, the checkpoint or the tensor does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The checkpoint is damaged or incomplete; the message names the file and the tensor. */
            409: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description Reading it would exceed a limit of bytes or time; the message names the limit. */
            413: {
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
            /** @description Too many requests wait for a read. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The store does not answer. */
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
    statistics_api_explorer_statistics_get: {
        parameters: {
            query: {
                /** @description The id of a place. */
                place: string;
                /** @description The id of a checkpoint, or a file. */
                id: string;
                /** @description The full name of a tensor. */
                name: string;
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
                    "application/json": components["schemas"]["Tensor"];
                };
            };
            /** @description The place, the checkpoint or the tensor does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The checkpoint is damaged or incomplete; the message names the file and the tensor. */
            409: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description Reading it would exceed a limit of bytes or time; the message names the limit. */
            413: {
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
            /** @description Too many requests wait for a read. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The store does not answer. */
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
    tasks_api_explorer_tasks_get: {
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
                    "application/json": components["schemas"]["TaskList"];
                };
            };
            /** @description The place, the checkpoint or the tensor does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The checkpoint is damaged or incomplete; the message names the file and the tensor. */
            409: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description Reading it would exceed a limit of bytes or time; the message names the limit. */
            413: {
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
            /** @description Too many requests wait for a read. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The store does not answer. */
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
    task_api_explorer_tasks__task__get: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                task: string;
            };
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
                    "application/json": components["schemas"]["VerifyTask"];
                };
            };
            /** @description The place, the checkpoint or the tensor does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The checkpoint is damaged or incomplete; the message names the file and the tensor. */
            409: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description Reading it would exceed a limit of bytes or time; the message names the limit. */
            413: {
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
            /** @description Too many requests wait for a read. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The store does not answer. */
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
    cancel_api_explorer_tasks__task__delete: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                task: string;
            };
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
                    "application/json": components["schemas"]["VerifyTask"];
                };
            };
            /** @description The place, the checkpoint or the tensor does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The checkpoint is damaged or incomplete; the message names the file and the tensor. */
            409: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description Reading it would exceed a limit of bytes or time; the message names the limit. */
            413: {
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
            /** @description Too many requests wait for a read. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The store does not answer. */
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
    tensors_api_explorer_tensors_get: {
        parameters: {
            query: {
                /** @description The id of a place. */
                place: string;
                /** @description The id of a checkpoint, or a file. */
                id: string;
                /** @description A part of the name, or a pattern with * and ?. */
                search?: string;
                /** @description The path of a group; omit it for the top. */
                under?: string | null;
                dtype?: string;
                property?: ("nan" | "inf" | "not_finite" | "constant" | "zero" | "dead_rows" | "changed") | null;
                sort?: "order" | "name" | "bytes" | "norm" | "max_abs" | "std" | "nan" | "dead_rows" | "change";
                descending?: boolean;
                /** @description The place of `against`; by default the same. */
                against_place?: string | null;
                /** @description The older checkpoint. */
                against?: string | null;
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
                    "application/json": components["schemas"]["TensorPage"];
                };
            };
            /** @description The place, the checkpoint or the tensor does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The checkpoint is damaged or incomplete; the message names the file and the tensor. */
            409: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description Reading it would exceed a limit of bytes or time; the message names the limit. */
            413: {
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
            /** @description Too many requests wait for a read. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The store does not answer. */
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
    children_api_explorer_tree_get: {
        parameters: {
            query: {
                /** @description The id of a place. */
                place: string;
                /** @description The id of a checkpoint, or a file. */
                id: string;
                /** @description The path of a group; omit it for the top. */
                under?: string | null;
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
                    "application/json": components["schemas"]["Page_TreeNode_"];
                };
            };
            /** @description The place, the checkpoint or the tensor does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The checkpoint is damaged or incomplete; the message names the file and the tensor. */
            409: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description Reading it would exceed a limit of bytes or time; the message names the limit. */
            413: {
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
            /** @description Too many requests wait for a read. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The store does not answer. */
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
    values_api_explorer_values_get: {
        parameters: {
            query: {
                /** @description The id of a place. */
                place: string;
                /** @description The id of a checkpoint, or a file. */
                id: string;
                /** @description The full name of a tensor. */
                name: string;
                /** @description As 0,128. */
                start?: string | null;
                /** @description As 0,128. */
                shape?: string | null;
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
                    "application/json": components["schemas"]["TensorValues"];
                };
            };
            /** @description The place, the checkpoint or the tensor does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The checkpoint is damaged or incomplete; the message names the file and the tensor. */
            409: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description Reading it would exceed a limit of bytes or time; the message names the limit. */
            413: {
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
            /** @description Too many requests wait for a read. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The store does not answer. */
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
    verify_api_explorer_verify_post: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["VerifyRequest"];
            };
        };
        responses: {
            /** @description Successful Response */
            202: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["VerifyTask"];
                };
            };
            /** @description The place, the checkpoint or the tensor does not exist. */
            404: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The checkpoint is damaged or incomplete; the message names the file and the tensor. */
            409: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description Reading it would exceed a limit of bytes or time; the message names the limit. */
            413: {
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
            /** @description Too many requests wait for a read. */
            429: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ErrorBody"];
                };
            };
            /** @description The store does not answer. */
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
