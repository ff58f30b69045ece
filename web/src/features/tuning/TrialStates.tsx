import type { StudyInfo, TrialState } from "@/shared/api/types";
import { count } from "@/shared/format/numbers";
import { numIn, TRIAL_STATES, trialToken } from "./views";

export function TrialDot({ state }: { state: TrialState }) {
  return <span className="dot" style={{ background: `var(${trialToken(state)})` }} aria-hidden="true" />;
}

/** Trials by state as one bar with its legend. */
export function TrialStates({ counts }: { counts: StudyInfo["counts"] }) {
  const present = TRIAL_STATES.filter((state) => numIn(counts, state) > 0);
  const words = present.map((state) => `${numIn(counts, state)} ${state}`).join(", ");
  return (
    <div className="states">
      <div className="states-bar" role="img" aria-label={words === "" ? "no trials yet" : words}>
        {present.map((state) => (
          <span key={state} style={{ flexGrow: numIn(counts, state), background: `var(${trialToken(state)})` }} />
        ))}
      </div>
      <ul className="states-legend">
        {present.map((state) => (
          <li key={state}>
            <TrialDot state={state} />
            <span className="num">{count(numIn(counts, state))}</span> {state}
          </li>
        ))}
      </ul>
    </div>
  );
}
