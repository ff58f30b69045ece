import { useId, useState } from "react";
import { ApiError } from "@/shared/api/client";
import { postLogin } from "@/shared/api/postLogin";
import { Button } from "@/shared/ui/Button";
import { Icon } from "@/shared/ui/Icon";
import { Mark } from "./Mark";

/** Asks for a token, which is exchanged for a session cookie and forgotten. */
export function Login({ onDone }: { onDone: () => void }) {
  const id = useId();
  const [token, setToken] = useState("");
  const [error, setError] = useState("");
  const [isBusy, setBusy] = useState(false);

  const submit = async (): Promise<void> => {
    setBusy(true);
    setError("");
    try {
      await postLogin(token.trim());
      setToken("");
      onDone();
    } catch (reason) {
      setError(reason instanceof ApiError ? reason.message : String(reason));
      setBusy(false);
    }
  };

  return (
    <main className="login">
      <form
        className="login-card"
        aria-labelledby={`${id}-title`}
        onSubmit={(event) => {
          event.preventDefault();
          void submit();
        }}
      >
        <Mark />
        <h1 id={`${id}-title`}>Log in to Strata</h1>
        <p className="muted">This coordinator requires a token. Any role can look; ask its operator for a reader token.</p>
        <label htmlFor={id}>Token</label>
        <input
          id={id}
          className="field"
          type="password"
          autoComplete="current-password"
          required
          maxLength={1024}
          value={token}
          aria-invalid={error !== ""}
          aria-describedby={error === "" ? undefined : `${id}-error`}
          onChange={(event) => {
            setToken(event.target.value);
          }}
        />
        {error !== "" && (
          <p className="login-error" id={`${id}-error`} role="alert">
            <Icon name="error" /> {error}
          </p>
        )}
        <Button type="submit" look="primary" disabled={isBusy || token.trim() === ""}>
          {isBusy ? "Checking…" : "Log in"}
        </Button>
        <p className="muted small">The token is sent once and never stored in the browser. The session ends after 12 hours.</p>
      </form>
    </main>
  );
}
