export function Mark() {
  return (
    <span className="mark">
      <svg width="24" height="24" viewBox="0 0 32 32" aria-hidden="true">
        <rect width="32" height="32" rx="8" fill="var(--accent)" />
        <path d="M6 11.5 16 7l10 4.5L16 16z" fill="var(--on-accent)" />
        <path
          d="m6 16.5 10 4.5 10-4.5M6 21l10 4.5L26 21"
          fill="none"
          stroke="var(--on-accent)"
          strokeWidth="2"
          strokeLinejoin="round"
          strokeLinecap="round"
          opacity=".75"
        />
      </svg>
      <span>Strata</span>
    </span>
  );
}
