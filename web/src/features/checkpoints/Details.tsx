import { useEffect, useState } from "react";
import { ApiError } from "@/shared/api/client";
import { exportAddress } from "@/shared/api/exportAddress";
import { getTask } from "@/shared/api/getTask";
import { postVerify } from "@/shared/api/postVerify";
import type { Place, StoredCheckpoint, VerifyTask } from "@/shared/api/types";
import { bytes, count, duration, percent } from "@/shared/format/numbers";
import { moment } from "@/shared/format/times";
import { Button } from "@/shared/ui/Button";
import { Select } from "@/shared/ui/Choice";
import { Icon } from "@/shared/ui/Icon";
import { Panel } from "@/shared/ui/Panel";
import { useNow } from "@/shared/ui/useNow";
import { useQuery } from "@/shared/url/useQuery";

interface Props {
  place: string;
  item: StoredCheckpoint;
  places: readonly Place[];
  /** The place whose checkpoints are offered for a comparison. */
  offeredFrom: Place;
  offered: readonly StoredCheckpoint[];
}

const POLL_MS = 500;
/** Checkpoints offered for a comparison; others are chosen in the timeline. */
const MAX_OFFERED = 200;

export function labelOf(item: StoredCheckpoint): string {
  return item.step === null ? item.id : `step ${count(item.step)} · ${item.id.slice(-6)}`;
}

/** What is known of a checkpoint without reading its tensors, and what can be done with it. */
export function Details({ place, item, places, offeredFrom, offered }: Props) {
  const { get, set } = useQuery();
  const now = useNow(5);
  const facts: [string, string][] = [
    ["Type", item.type === null ? "safetensors file" : item.type.toLowerCase().replace("_", " ")],
    ["Step", count(item.step)],
    ["Epoch", count(item.epoch)],
    ["Created", moment(item.created_at_s)],
    ["Age", duration(Math.max(now - item.created_at_s, 0))],
    ["Files", bytes(item.size_bytes)],
    ["State", bytes(item.full_bytes)],
    ["Tensors", count(item.num_tensors)],
    ["Ranks", count(item.num_ranks)],
    ...(item.duration_s === null ? [] : ([["Save took", duration(item.duration_s)]] as [string, string][])),
    ...(item.stall_s === null ? [] : ([["Blocked training for", duration(item.stall_s)]] as [string, string][])),
    ...Object.entries(item.metadata).map(([name, value]): [string, string] => [
      name,
      typeof value === "object" ? JSON.stringify(value) : String(value),
    ]),
  ];
  return (
    <Panel
      title={item.step === null ? item.id : `Step ${count(item.step)}`}
      detail={item.step === null ? undefined : <code>{item.id}</code>}
      actions={
        <>
          {places.length > 1 && (
            <Select
              label="Compare with a checkpoint of"
              value={offeredFrom.place}
              options={places.map((each) => ({
                value: each.place,
                label: each.place === place ? "this place" : each.label,
              }))}
              onChange={(chosen) => {
                set({ against_place: chosen === place ? null : chosen, against: null });
              }}
            />
          )}
          <Select
            label="Compare with"
            value={get("against")}
            options={[
              { value: "", label: "Compare with…" },
              ...offered.slice(0, MAX_OFFERED).map((each) => ({ value: each.id, label: labelOf(each) })),
            ]}
            onChange={(against) => {
              set({ against }, { push: true });
            }}
          />
          <a className="button plain" href={exportAddress(place, item.id)} download>
            <Icon name="download" /> safetensors
          </a>
          <Verify place={place} id={item.id} />
        </>
      }
    >
      {item.why !== "" && <p className="why">{item.why}</p>}
      <dl className="facts">
        {facts.map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd className="num truncate" title={value}>
              {value}
            </dd>
          </div>
        ))}
        {item.parent !== "" && (
          <div>
            <dt>Parent</dt>
            <dd className="truncate">
              <button
                type="button"
                className="as-link"
                onClick={() => {
                  set({ id: item.parent }, { push: true });
                }}
              >
                {item.parent}
              </button>
            </dd>
          </div>
        )}
      </dl>
    </Panel>
  );
}

/** Checks every byte in the background and shows how far it is. */
function Verify({ place, id }: { place: string; id: string }) {
  const [task, setTask] = useState<VerifyTask>();
  const [error, setError] = useState("");
  const isRunning = task?.state === "running";
  useEffect(() => {
    if (task?.state !== "running") return undefined;
    const timer = window.setTimeout(() => {
      getTask(task.task).then(setTask, (reason: unknown) => {
        setError(reason instanceof ApiError ? reason.message : String(reason));
        setTask(undefined);
      });
    }, POLL_MS);
    return () => {
      window.clearTimeout(timer);
    };
  }, [task]);
  return (
    <>
      <Button
        icon="ok"
        disabled={isRunning}
        onClick={() => {
          setError("");
          postVerify(place, id).then(setTask, (reason: unknown) => {
            setError(reason instanceof ApiError ? reason.message : String(reason));
          });
        }}
      >
        {isRunning ? `Verifying ${percent(task.total_bytes > 0 ? task.done_bytes / task.total_bytes : 0)}` : "Verify"}
      </Button>
      <span role="status" className="verify">
        {task?.state === "done" && <span className="badge ok">every byte is intact</span>}
        {task?.state === "failed" && <span className="badge error">damaged: {task.problem}</span>}
        {error !== "" && <span className="badge error">{error}</span>}
      </span>
    </>
  );
}
