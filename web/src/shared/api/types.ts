/** The names by which the page uses the generated types of the API. */
import type { components as Dashboard } from "./generated/dashboard";
import type { components as Explorer } from "./generated/explorer";

type D = Dashboard["schemas"];

export type SessionInfo = D["SessionInfo"];
export type LoginAnswer = D["LoginAnswer"];
export type Overview = D["Overview"];
export type RunEnd = D["RunEnd"];
export type JobSummary = D["JobSummary"];
export type JobState = JobSummary["state"];
export type CoordinatorFigures = D["CoordinatorFigures"];
export type HealthState = D["HealthState"];
export type HealthFinding = D["HealthFinding"];
export type Level = HealthState["level"];
export type SeriesInfo = D["SeriesInfo"];
export type SeriesPoints = D["SeriesPoints"];
export type History = D["History"];
export type LiveEvents = D["LiveEvents"];
export type WorkersChanged = D["WorkersChanged"];
export type Points = D["Points"];
export type Worker = D["Worker"];
export type WorkerState = Worker["state"];
export type EventLine = D["EventLine"];
export type EventPage = D["EventPage"];
export type Checkpoint = D["Checkpoint"];
export type Goodput = D["Goodput"];
export type GoodputEntry = D["GoodputEntry"];
export type GoodputCategory = keyof GoodputEntry["parts_s"];
export type Recoveries = D["Recoveries"];
export type RunRecovery = D["RunRecovery"];
export type RecoveryMoment = D["RecoveryMoment"];
export type RunInfo = D["RunInfo"];
export type WorkerLog = D["WorkerLog"];
export type JobData = D["JobData"];
export type JobShards = D["JobShards"];
export type ShardOwner = D["ShardOwner"];
export type RankDataWait = D["RankDataWait"];
export type JobServers = D["JobServers"];
export type ServerFigures = D["ServerFigures"];
export type JobTime = D["JobTime"];
export type WorkerTime = D["WorkerTime"];
export type JobLineage = D["JobLineage"];
export type CheckpointLine = D["CheckpointLine"];
export type StudyRef = D["StudyRef"];
export type StudyInfo = D["StudyInfo"];
export type StudyTrial = D["StudyTrial"];
export type TrialState = StudyTrial["state"];
export type StudyCurves = D["StudyCurves"];
export type StudyCurve = D["StudyCurve"];
export type StudyHistory = D["StudyHistory"];
export type StudyParallel = D["StudyParallel"];
export type StudyPareto = D["StudyPareto"];
export type StudyImportances = D["StudyImportances"];

export interface Page<Item> {
  items: Item[];
  total: number;
  limit: number;
  offset: number;
  next_offset: number | null;
}

type X = Explorer["schemas"];

export type Place = X["ExplorerPlace"];
export type StoredCheckpoint = X["ExplorerCheckpoint"];
export type StoredCheckpointPage = X["ExplorerCheckpointPage"];
export type TreeNode = X["TreeNode"];
export type TreePage = X["Page_TreeNode_"];
export type Tensor = X["Tensor"];
export type TensorPage = X["TensorPage"];
export type TensorStatistics = X["TensorStatistics"];
export type TensorChange = X["TensorChange"];
export type TensorHistogram = X["TensorHistogram"];
export type TensorHeatMap = X["TensorHeatMap"];
export type TensorRows = X["TensorRows"];
export type SingularValues = X["SingularValues"];
export type ComparedPage = X["ComparedPage"];
export type ComparedTensor = X["ComparedTensor"];
export type ComparedHistogram = X["ComparedHistogram"];
export type FollowedPage = X["FollowedPage"];
export type ScanState = X["ScanState"];
export type VerifyTask = X["VerifyTask"];

/** A tensor of a checkpoint of a place. */
export interface TensorRef {
  place: string;
  id: string;
  name: string;
}
