import { useState } from "react";
import { postTrialRequeue } from "@/shared/api/postTrialRequeue";
import { postTrialStop } from "@/shared/api/postTrialStop";
import type { StudyTrial } from "@/shared/api/types";
import { Button } from "@/shared/ui/Button";
import { Confirm } from "@/shared/ui/Confirm";

interface Props {
  study: string;
  trial: StudyTrial;
}

/** Stop a trial, or let it start again, each after a confirmation. */
export function TrialCommands({ study, trial }: Props) {
  const [asked, setAsked] = useState<"stop" | "requeue">();
  const close = (): void => {
    setAsked(undefined);
  };
  const isRunning = trial.state === "running";
  const hasStarted = isRunning || ((trial.state === "paused" || trial.state === "queued") && trial.num_starts > 0);
  if (!hasStarted && asked === undefined) return null;
  return (
    <>
      {isRunning && (
        <Button
          onClick={() => {
            setAsked("requeue");
          }}
        >
          Start again…
        </Button>
      )}
      {hasStarted && (
        <Button
          onClick={() => {
            setAsked("stop");
          }}
        >
          Stop…
        </Button>
      )}
      {asked === "stop" && (
        <Confirm
          title={`Stop trial ${trial.number}?`}
          action="Stop the trial"
          run={() => postTrialStop(study, trial.number)}
          onClose={close}
        >
          <p>
            It ends as pruned{isRunning ? " at its next report, or is killed after a minute without one" : ""}. It cannot
            be continued; its reports and checkpoints are kept, and the study goes on.
          </p>
        </Confirm>
      )}
      {asked === "requeue" && (
        <Confirm
          title={`Start trial ${trial.number} again?`}
          action="Start it again"
          run={() => postTrialRequeue(study, trial.number)}
          onClose={close}
        >
          <p>
            It saves at its next report, is queued, and continues from its last checkpoint in a new process. A training
            function that saves nothing starts from the beginning.
          </p>
        </Confirm>
      )}
    </>
  );
}
