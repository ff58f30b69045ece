import { useState } from "react";
import { getRun } from "@/shared/api/getRun";
import { postScale } from "@/shared/api/postScale";
import { postStop } from "@/shared/api/postStop";
import type { RunInfo } from "@/shared/api/types";
import { plural } from "@/shared/format/numbers";
import { Button } from "@/shared/ui/Button";
import { Confirm } from "@/shared/ui/Confirm";

interface Props {
  run: RunInfo;
}

/** Stop and scale the run, each after a confirmation. */
export function RunCommands({ run: loaded }: Props) {
  const [run, setRun] = useState(loaded);
  const [asked, setAsked] = useState<"stop" | "scale">();
  const [isNow, setNow] = useState(false);
  const [workers, setWorkers] = useState(loaded.min_workers);
  const close = (): void => {
    setAsked(undefined);
  };
  const askForScale = async (): Promise<void> => {
    const current = (await getRun().catch(() => null)) ?? run; // it may have been scaled since the page was opened
    setRun(current);
    setWorkers(current.num_workers ?? current.min_workers);
    setAsked("scale");
  };
  const isElastic = run.max_workers > run.min_workers;
  return (
    <>
      {isElastic && (
        <Button
          onClick={() => {
            void askForScale();
          }}
        >
          Scale…
        </Button>
      )}
      <Button
        onClick={() => {
          setNow(false);
          setAsked("stop");
        }}
      >
        Stop…
      </Button>
      {asked === "stop" && (
        <Confirm title={`Stop ${run.name}?`} action={isNow ? "Stop now" : "Save and stop"} run={() => postStop(isNow)} onClose={close}>
          <p>
            {isNow
              ? "All workers are killed. Steps since the last checkpoint are lost."
              : "All workers save a checkpoint, then exit."}{" "}
            This page ends with the run; <code>strata resume {run.name}</code> continues it.
          </p>
          <label>
            <input
              type="checkbox"
              checked={isNow}
              onChange={(event) => {
                setNow(event.target.checked);
              }}
            />{" "}
            Stop now, without saving
          </label>
        </Confirm>
      )}
      {asked === "scale" && (
        <Confirm
          title={`Scale ${run.name}`}
          action={`Continue with ${plural(workers, "worker")}`}
          run={() => postScale(workers)}
          onClose={close}
        >
          <p>All workers save a checkpoint, then the run continues from it with another world size.</p>
          <label>
            Workers ({run.min_workers} to {run.max_workers}){" "}
            <input
              type="number"
              required
              min={run.min_workers}
              max={run.max_workers}
              value={workers}
              onChange={(event) => {
                setWorkers(event.target.valueAsNumber || run.min_workers);
              }}
            />
          </label>
        </Confirm>
      )}
    </>
  );
}
