import { useMemo } from "react";
import { getPlaces } from "@/shared/api/getPlaces";
import { getStoredCheckpoints } from "@/shared/api/getStoredCheckpoints";
import type { Place, StoredCheckpoint } from "@/shared/api/types";
import { useApi } from "@/shared/api/useApi";
import { count } from "@/shared/format/numbers";
import { useJob } from "@/shared/live/useJob";
import { Select } from "@/shared/ui/Choice";
import { type Command as PaletteCommand, useCommands } from "@/shared/ui/commands";
import { Icon } from "@/shared/ui/Icon";
import { Command, Empty, Failure, Loading } from "@/shared/ui/Notice";
import { Panel } from "@/shared/ui/Panel";
import { useQuery } from "@/shared/url/useQuery";
import { Details } from "./Details";
import { Explorer } from "./Explorer";
import { JobCheckpoints } from "./JobCheckpoints";
import { LineagePanel } from "./LineagePanel";
import { Timeline } from "./Timeline";
import "./checkpoints.css";

/** New checkpoints appear while a run saves them. */
const EVERY_S = 10;
const NONE: readonly StoredCheckpoint[] = [];

export default function CheckpointsPage() {
  const { get } = useQuery();
  const { jobId } = useJob();
  const places = useApi("places", getPlaces, { everyS: 30 });
  if (places.data === undefined && places.error === undefined) return <Loading rows={6} label="Loading the checkpoints" />;
  const all = places.data ?? [];
  const chosen =
    all.find((place) => place.place === get("place")) ?? all.find((place) => place.label === jobId) ?? all[0];
  if (chosen !== undefined) return <Checkpoints place={chosen} places={all} />;
  const isUnknown = places.error !== undefined && places.error.status !== 404;
  return (
    <div className="page">
      <h1>Checkpoints</h1>
      {isUnknown && <Failure error={places.error as NonNullable<typeof places.error>} onRetry={places.reload} />}
      {!isUnknown && jobId !== "" && (
        <>
          <JobCheckpoints job={jobId} />
          <LineagePanel job={jobId} stored={NONE} />
        </>
      )}
      {!isUnknown && jobId === "" && (
        <Empty icon="checkpoints" title="No checkpoints to show">
          <p>Save some from a run, or open a directory, a bucket or a .safetensors file:</p>
          <Command>strata dashboard runs/checkpoints</Command>
        </Empty>
      )}
    </div>
  );
}

function Checkpoints({ place, places }: { place: Place; places: Place[] }) {
  const { get, set } = useQuery();
  const { jobId } = useJob();
  const page = useApi(`checkpoints ${place.place}`, (signal) => getStoredCheckpoints(place.place, signal), {
    everyS: EVERY_S,
  });
  const items = useMemo(() => page.data?.items ?? [], [page.data]);
  const chosen = items.find((each) => each.id === get("id")) ?? items[0];
  const against = get("against");
  const otherPlace = places.find((each) => each.place === get("against_place") && each !== place);
  const otherPage = useApi(
    `checkpoints ${otherPlace?.place ?? ""}`,
    (signal) => getStoredCheckpoints(otherPlace?.place ?? "", signal),
    { everyS: EVERY_S, enabled: otherPlace !== undefined },
  );
  const offered = otherPlace === undefined ? items.filter((each) => each !== chosen) : (otherPage.data?.items ?? []);
  const other = offered.find((each) => each.id === against);
  const problems = Object.entries(page.data?.problems ?? {});
  const commands = useMemo<PaletteCommand[]>(
    () =>
      items.slice(0, 200).map((item) => ({
        id: `checkpoint-${item.id}`,
        group: "Checkpoint",
        label: item.step === null ? item.id : `step ${count(item.step)}`,
        detail: item.id,
        run: () => {
          set({ id: item.id });
        },
      })),
    [items, set],
  );
  useCommands("checkpoints", commands);

  return (
    <div className="page">
      <div className="page-head">
        <div className="truncate">
          <h1>Checkpoints</h1>
          <p className="lead truncate mono" title={place.location}>
            {place.location}
          </p>
        </div>
        {places.length > 1 && (
          <Select
            label="Place"
            value={place.place}
            options={places.map((each) => ({ value: each.place, label: each.label }))}
            onChange={(value) => {
              set({ place: value, id: null, name: null, against: null, against_place: null }, { push: true });
            }}
          />
        )}
      </div>
      {page.error !== undefined && <Failure error={page.error} onRetry={page.reload} />}
      {otherPage.error !== undefined && <Failure error={otherPage.error} onRetry={otherPage.reload} />}
      {page.data === undefined && page.error === undefined && <Loading rows={5} label="Loading the checkpoints" />}
      {page.data !== undefined && items.length === 0 && (
        <div className="panel">
          <Empty icon="checkpoints" title="No checkpoint here yet">
            <p>A script saves one with</p>
            <code className="command">ctx.maybe_checkpoint({"{"}"model": model, "optimizer": optimizer{"}"})</code>
          </Empty>
        </div>
      )}
      {chosen !== undefined && (
        <>
          <Panel
            title="Timeline"
            detail={
              (page.data?.total ?? 0) > items.length
                ? `the newest ${count(items.length)} of ${count(page.data?.total)}`
                : `${count(items.length)} kept`
            }
          >
            <Timeline
              items={items}
              chosen={chosen.id}
              against={otherPlace === undefined ? against : ""}
              onChoose={(id, isSecond) => {
                if (isSecond) set({ against: id === chosen.id ? null : id, against_place: null }, { push: true });
                else set({ id }, { push: true });
              }}
            />
            {problems.length > 0 && (
              <ul className="problems">
                {problems.map(([id, why]) => (
                  <li key={id}>
                    <Icon name="warning" />
                    <span>
                      <code>{id}</code> is ignored: {why}
                    </span>
                  </li>
                ))}
              </ul>
            )}
          </Panel>
          {jobId !== "" && place.label === jobId && <LineagePanel job={jobId} stored={items} />}
          <Details
            key={`details ${chosen.id}`}
            place={place.place}
            item={chosen}
            {...{ places, offered }}
            offeredFrom={otherPlace ?? place}
          />
          <Explorer
            place={place.place}
            item={chosen}
            against={other === undefined ? undefined : { place: otherPlace ?? place, item: other }}
          />
        </>
      )}
    </div>
  );
}
