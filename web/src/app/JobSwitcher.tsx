import { useLive } from "@/shared/live/store";
import { Select } from "@/shared/ui/Choice";
import { useQuery } from "@/shared/url/useQuery";

/** Chooses the job that every page shows; without a choice they show the first. */
export function JobSwitcher() {
  const jobs = useLive((state) => state.jobs);
  const { get, set } = useQuery();
  if (jobs.length === 0) return null;
  const chosen = get("job");
  const known = jobs.some((job) => job.job_id === chosen) || chosen === "";
  const options = [
    ...(known ? [] : [{ value: chosen, label: `${chosen} (not running)` }]),
    ...jobs.map((job) => ({ value: job.job_id, label: job.job_id })),
  ];
  return (
    <Select
      label="Job"
      value={chosen === "" ? (jobs[0]?.job_id ?? "") : chosen}
      options={options}
      onChange={(job) => {
        set({ job }, { push: true });
      }}
    />
  );
}
