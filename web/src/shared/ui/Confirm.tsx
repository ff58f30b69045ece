import { type ReactNode, useEffect, useId, useRef, useState } from "react";
import { ApiError } from "@/shared/api/client";
import { Button } from "./Button";
import { Failure } from "./Notice";

interface Props {
  title: string;
  /** What will happen. */
  children: ReactNode;
  /** The words of the button that does it. */
  action: string;
  run: () => Promise<void>;
  onClose: () => void;
}

/** Asks before something is done, and shows the server's answer if it is refused. Escape cancels. */
export function Confirm({ title, children, action, run, onClose }: Props) {
  const dialog = useRef<HTMLDialogElement>(null);
  const id = useId();
  const [isBusy, setBusy] = useState(false);
  const [error, setError] = useState<ApiError>();
  useEffect(() => {
    dialog.current?.showModal();
  }, []);
  const submit = (): void => {
    setBusy(true);
    setError(undefined);
    run().then(onClose, (reason: unknown) => {
      setError(reason instanceof ApiError ? reason : new ApiError(0, "", String(reason)));
      setBusy(false);
    });
  };
  return (
    <dialog ref={dialog} className="confirm" aria-labelledby={id} onClose={onClose}>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          submit();
        }}
      >
        <h2 id={id}>{title}</h2>
        <div className="confirm-words">{children}</div>
        {error !== undefined && <Failure error={error} />}
        <div className="confirm-buttons">
          <Button onClick={onClose}>Cancel</Button>
          <Button type="submit" look="primary" disabled={isBusy}>
            {action}
          </Button>
        </div>
      </form>
    </dialog>
  );
}
