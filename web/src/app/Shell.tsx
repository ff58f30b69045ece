import { type ReactNode, useMemo, useState } from "react";
import { Link, useLocation } from "wouter";
import { getStudies } from "@/shared/api/getStudies";
import { postLogout } from "@/shared/api/postLogout";
import { useApi } from "@/shared/api/useApi";
import { useLive } from "@/shared/live/store";
import { type Choice, useTheme } from "@/shared/theme/theme";
import { Button } from "@/shared/ui/Button";
import { type Command, useCommands } from "@/shared/ui/commands";
import { Icon, type IconName } from "@/shared/ui/Icon";
import { useQuery } from "@/shared/url/useQuery";
import { ConnectionBadge } from "./ConnectionBadge";
import { EndedNotice } from "./EndedNotice";
import { HealthLine } from "./HealthLine";
import { JobSwitcher } from "./JobSwitcher";
import { Mark } from "./Mark";
import { Palette, useShortcut } from "./Palette";

interface PageLink {
  path: string;
  label: string;
  icon: IconName;
  needsCoordinator: boolean;
  /** Shown only while a job has parameter servers. */
  needsServers?: boolean;
  /** Whether it is listed only on a server that has a study. */
  needsStudy?: boolean;
}

const PAGES: readonly PageLink[] = [
  { path: "/", label: "Overview", icon: "overview", needsCoordinator: true },
  { path: "/workers", label: "Workers", icon: "workers", needsCoordinator: true },
  { path: "/data", label: "Data", icon: "tensor", needsCoordinator: true },
  { path: "/servers", label: "Servers", icon: "folder", needsCoordinator: true, needsServers: true },
  { path: "/goodput", label: "Goodput", icon: "compare", needsCoordinator: true },
  { path: "/recovery", label: "Recovery", icon: "follow", needsCoordinator: true },
  { path: "/events", label: "Events", icon: "events", needsCoordinator: true },
  { path: "/tuning", label: "Tuning", icon: "tuning", needsCoordinator: false, needsStudy: true },
  { path: "/checkpoints", label: "Checkpoints", icon: "checkpoints", needsCoordinator: false },
];

const KEYS = navigator.platform.startsWith("Mac") ? "⌘ K" : "Ctrl K";

const THEMES: readonly { choice: Choice; icon: IconName; label: string }[] = [
  { choice: "system", icon: "system", label: "Theme: as the system" },
  { choice: "light", icon: "sun", label: "Theme: light" },
  { choice: "dark", icon: "moon", label: "Theme: dark" },
];

export function Shell({ children, hasCoordinator }: { children: ReactNode; hasCoordinator: boolean }) {
  const [path, navigate] = useLocation();
  const { href } = useQuery();
  const [isOpen, setOpen] = useState(false);
  const { choice, choose } = useTheme();
  const version = useLive((state) => state.version);
  const jobs = useLive((state) => state.jobs);
  const hasServers = jobs.some((job) => job.num_servers > 0);
  const hasStudy = (useApi("studies", getStudies).data?.length ?? 0) > 0;
  const pages = useMemo(
    () =>
      PAGES.filter(
        (page) =>
          (hasCoordinator || !page.needsCoordinator) &&
          (hasServers || page.needsServers !== true) &&
          (hasStudy || page.needsStudy !== true),
      ),
    [hasCoordinator, hasServers, hasStudy],
  );
  useShortcut(() => {
    setOpen((before) => !before);
  });

  const jobIds = jobs.map((job) => job.job_id).join("\n");
  const commands = useMemo<Command[]>(
    () => [
      ...pages.map((page) => ({
        id: `page-${page.path}`,
        group: "Go to",
        label: page.label,
        run: () => {
          navigate(href(page.path));
        },
      })),
      ...(jobIds === "" ? [] : jobIds.split("\n")).map((job) => ({
        id: `job-${job}`,
        group: "Job",
        label: job,
        run: () => {
          navigate(href("/", { job }));
        },
      })),
      ...THEMES.map((theme) => ({
        id: `theme-${theme.choice}`,
        group: "Settings",
        label: theme.label,
        run: () => {
          choose(theme.choice);
        },
      })),
      {
        id: "copy-link",
        group: "Settings",
        label: "Copy link to this view",
        run: () => void navigator.clipboard.writeText(window.location.href),
      },
      {
        id: "logout",
        group: "Settings",
        label: "Log out",
        run: () => {
          postLogout().finally(() => {
            window.location.reload();
          });
        },
      },
    ],
    [choose, href, jobIds, navigate, pages],
  );
  useCommands("shell", commands);

  const current = THEMES.findIndex((theme) => theme.choice === choice);
  const shown = THEMES[current] ?? THEMES[0];
  const next = THEMES[(current + 1) % THEMES.length];

  return (
    <div className="shell">
      <a className="skip" href="#main">
        Skip to the contents
      </a>
      <nav className="sidebar" aria-label="Pages">
        <Link href={href("/")} className="home" aria-label="Strata: overview">
          <Mark />
        </Link>
        <ul>
          {pages.map((page) => (
            <li key={page.path}>
              <Link href={href(page.path)} className="nav-link" aria-current={path === page.path ? "page" : undefined}>
                <Icon name={page.icon} />
                <span>{page.label}</span>
              </Link>
            </li>
          ))}
        </ul>
        <div className="sidebar-foot muted">
          {version !== "" && <span>Strata {version}</span>}
        </div>
      </nav>
      <header className="topbar">
        {hasCoordinator && <JobSwitcher />}
        {hasCoordinator && <HealthLine />}
        <div className="topbar-end">
          {hasCoordinator && <ConnectionBadge />}
          <button
            type="button"
            className="palette-button"
            aria-keyshortcuts="Control+K Meta+K"
            aria-label={`Search ${KEYS}: pages, jobs and commands`}
            onClick={() => {
              setOpen(true);
            }}
          >
            <Icon name="search" size={14} />
            <span>Search</span>
            <kbd>{KEYS}</kbd>
          </button>
          {shown !== undefined && next !== undefined && (
            <Button
              look="quiet"
              icon={shown.icon}
              aria-label={`${shown.label}; change`}
              onClick={() => {
                choose(next.choice);
              }}
            />
          )}
        </div>
      </header>
      <main id="main" className="main" tabIndex={-1}>
        <EndedNotice />
        {children}
      </main>
      {isOpen && (
        <Palette
          onClose={() => {
            setOpen(false);
          }}
        />
      )}
    </div>
  );
}
