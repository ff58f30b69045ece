import { StrictMode } from "react";
import { createRoot } from "react-dom/client";
import "@/shared/theme/tokens.css";
import "@/shared/theme/base.css";
import "@/shared/ui/ui.css";
import "./app.css";
import { installTheme } from "@/shared/theme/theme";
import { App } from "./App";

installTheme();
const root = document.getElementById("root");
if (root === null) throw new Error("index.html has no #root");
createRoot(root).render(
  <StrictMode>
    <App />
  </StrictMode>,
);
