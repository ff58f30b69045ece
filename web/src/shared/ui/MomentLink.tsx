import type { ReactNode } from "react";
import { Link } from "wouter";
import { useQuery } from "@/shared/url/useQuery";

interface Props {
  /** Seconds since 1970. */
  atS: number;
  children: ReactNode;
}

/** Leads to the events around a moment. */
export function MomentLink({ atS, children }: Props) {
  const { href } = useQuery();
  return (
    <Link href={href("/events", { time: atS.toFixed(3) })} title="Events around this moment">
      {children}
    </Link>
  );
}
