import type { ButtonHTMLAttributes, ReactNode } from "react";
import { Icon, type IconName } from "./Icon";

interface Props extends ButtonHTMLAttributes<HTMLButtonElement> {
  icon?: IconName;
  look?: "plain" | "primary" | "quiet";
  children?: ReactNode;
}

/** A button; one without text needs `aria-label`, which is its tooltip as well. */
export function Button({ icon, look = "plain", children, className = "", ...rest }: Props) {
  const isBare = children === undefined || children === null;
  return (
    <button
      type="button"
      title={isBare ? rest["aria-label"] : undefined}
      {...rest}
      className={`button ${look} ${isBare ? "bare" : ""} ${className}`}
    >
      {icon !== undefined && <Icon name={icon} />}
      {children}
    </button>
  );
}
