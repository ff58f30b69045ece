import { useEffect, useState } from "react";
import { Icon } from "./Icon";

interface Props {
  label: string;
  value: string;
  onChange: (value: string) => void;
  placeholder?: string;
}

const PAUSE_MS = 200;

/** A field that filters what is below it, once typing pauses. */
export function SearchField({ label, value, onChange, placeholder = label }: Props) {
  const [text, setText] = useState(value);
  useEffect(() => {
    setText(value);
  }, [value]);
  useEffect(() => {
    if (text === value) return undefined;
    const timer = window.setTimeout(() => {
      onChange(text);
    }, PAUSE_MS);
    return () => {
      window.clearTimeout(timer);
    };
  }, [text, value, onChange]);
  return (
    <label className="search">
      <Icon name="search" size={14} />
      <span className="sr-only">{label}</span>
      <input
        type="search"
        value={text}
        placeholder={placeholder}
        spellCheck={false}
        autoComplete="off"
        onChange={(event) => {
          setText(event.target.value);
        }}
      />
    </label>
  );
}
