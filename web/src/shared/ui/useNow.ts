import { useEffect, useState } from "react";

/** The wall time in seconds, brought up to date every `everyS` seconds. */
export function useNow(everyS = 1): number {
  const [now, setNow] = useState(() => Date.now() / 1000);
  useEffect(() => {
    const timer = window.setInterval(() => {
      setNow(Date.now() / 1000);
    }, everyS * 1000);
    return () => {
      window.clearInterval(timer);
    };
  }, [everyS]);
  return now;
}
