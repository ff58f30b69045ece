import { lazy, Suspense } from "react";
import { Route, Switch } from "wouter";
import { OverviewPage } from "@/features/overview/OverviewPage";
import { Empty, Failure, Loading } from "@/shared/ui/Notice";
import { Login } from "./Login";
import { Shell } from "./Shell";
import { useConnection } from "./useConnection";

const WorkersPage = lazy(() => import("@/features/workers/WorkersPage"));
const DataPage = lazy(() => import("@/features/data/DataPage"));
const ServersPage = lazy(() => import("@/features/servers/ServersPage"));
const EventsPage = lazy(() => import("@/features/events/EventsPage"));
const GoodputPage = lazy(() => import("@/features/goodput/GoodputPage"));
const RecoveryPage = lazy(() => import("@/features/recovery/RecoveryPage"));
const TuningPage = lazy(() => import("@/features/tuning/TuningPage"));
const OfflineHome = lazy(() => import("./OfflineHome"));
const CheckpointsPage = lazy(() => import("@/features/checkpoints/CheckpointsPage"));

export function App() {
  const { phase, error, retry } = useConnection();
  if (phase === "login") return <Login onDone={retry} />;
  const hasCoordinator = phase !== "offline-only";
  return (
    <Shell hasCoordinator={hasCoordinator}>
      {phase === "loading" && <Loading rows={6} label="Connecting to the coordinator" />}
      {phase === "failed" && error !== undefined && <Failure error={error} onRetry={retry} />}
      {(phase === "ready" || phase === "offline-only") && (
        <Suspense fallback={<Loading rows={6} label="Loading the page" />}>
          <Switch>
            <Route path="/">{hasCoordinator ? <OverviewPage /> : <OfflineHome />}</Route>
            <Route path="/workers">
              <WorkersPage />
            </Route>
            <Route path="/data">
              <DataPage />
            </Route>
            <Route path="/servers">
              <ServersPage />
            </Route>
            <Route path="/events">
              <EventsPage />
            </Route>
            <Route path="/goodput">
              <GoodputPage />
            </Route>
            <Route path="/recovery">
              <RecoveryPage />
            </Route>
            <Route path="/tuning">
              <TuningPage />
            </Route>
            <Route path="/checkpoints">
              <CheckpointsPage />
            </Route>
            <Route>
              <Empty icon="search" title="No such page">
                The address names no page of the dashboard. Choose one from the navigation.
              </Empty>
            </Route>
          </Switch>
        </Suspense>
      )}
    </Shell>
  );
}
