import { lazy } from "react";
import { getStudies } from "@/shared/api/getStudies";
import { useApi } from "@/shared/api/useApi";
import { Loading } from "@/shared/ui/Notice";

const TuningPage = lazy(() => import("@/features/tuning/TuningPage"));
const CheckpointsPage = lazy(() => import("@/features/checkpoints/CheckpointsPage"));

/** The first view of `strata dashboard`: the study if one was opened, otherwise checkpoints. */
export default function OfflineHome() {
  const studies = useApi("studies", getStudies);
  if (studies.isLoading) return <Loading rows={6} label="Loading the page" />;
  return (studies.data?.length ?? 0) > 0 ? <TuningPage /> : <CheckpointsPage />;
}
