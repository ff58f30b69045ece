interface Option<Value extends string> {
  value: Value;
  label: string;
  title?: string;
}

interface Props<Value extends string> {
  label: string;
  value: Value;
  options: readonly Option<Value>[];
  onChange: (value: Value) => void;
}

/** A row of options of which exactly one is chosen. */
export function Choice<Value extends string>({ label, value, options, onChange }: Props<Value>) {
  return (
    <div className="choice" role="group" aria-label={label}>
      {options.map((option) => (
        <button
          key={option.value}
          type="button"
          aria-pressed={option.value === value}
          title={option.title}
          onClick={() => {
            onChange(option.value);
          }}
        >
          {option.label}
        </button>
      ))}
    </div>
  );
}

/** A labelled drop-down list. */
export function Select<Value extends string>({ label, value, options, onChange }: Props<Value>) {
  return (
    <label className="select">
      <span className="sr-only">{label}</span>
      <select
        value={value}
        title={label}
        onChange={(event) => {
          onChange(event.target.value as Value);
        }}
      >
        {options.map((option) => (
          <option key={option.value} value={option.value}>
            {option.label}
          </option>
        ))}
      </select>
    </label>
  );
}
