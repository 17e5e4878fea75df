// The state that all parts of the page share, and the hooks by which they follow it.

import { useEffect, useLayoutEffect, useState } from "preact/hooks";
import { themeOf, type Theme } from "./colours";
import type { Live } from "./live";
import type { Model } from "./model";
import { Viewport } from "./painter";

const THEME = "phaseloom-theme";

export class App {
  readonly view = new Viewport();
  private choice = stored();
  private readonly dark = matchMedia("(prefers-color-scheme: dark)");
  private readonly listeners = new Set<() => void>();

  constructor(
    readonly model: Model,
    /** null: a run is replayed */
    public live: Live | null,
    readonly title: string,
  ) {
    this.dark.addEventListener("change", () => this.applyTheme());
    this.applyTheme();
  }

  get isDark(): boolean {
    return this.choice ? this.choice === "dark" : this.dark.matches;
  }

  get theme(): Theme {
    return themeOf(this.isDark);
  }

  toggleTheme(): void {
    this.choice = this.isDark ? "light" : "dark";
    try {
      localStorage.setItem(THEME, this.choice);
    } catch {
      // A page from a file may not store anything.
    }
    this.applyTheme();
  }

  listen(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  changed(): void {
    for (const listener of this.listeners) listener();
  }

  /** Now, in the rows' seconds; where a run is replayed, its end. */
  nowS(): number {
    return this.live ? this.model.nowS() : this.model.lastS;
  }

  private applyTheme(): void {
    document.documentElement.dataset.theme = this.isDark ? "dark" : "light";
    this.changed();
  }
}

function stored(): string | null {
  try {
    return localStorage.getItem(THEME);
  } catch {
    return null;
  }
}

/** Render again whenever the app says that something changed. */
export function useApp(app: App): void {
  const [, set] = useState(0);
  // Before anything else can happen: a change that nobody listens to yet would never be shown.
  useLayoutEffect(() => app.listen(() => set((n) => n + 1)), [app]);
}

/** Render again at a pace. */
export function useTick(everyMs: number): number {
  const [tick, set] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => set((n) => n + 1), everyMs);
    return () => clearInterval(timer);
  }, [everyMs]);
  return tick;
}

/** The answer to a question, asked again every `everyMs` (0: never); or the error, as it was thrown.
 *
 * @param key which question it is: a new one forgets the answer of the one before
 * @param ask null: nothing is asked
 */
export function useAsked<T>(key: string, ask: (() => Promise<T>) | null, everyMs: number): { answer?: T; error?: unknown } {
  const [state, set] = useState<{ key: string; answer?: T; error?: unknown }>({ key });
  useEffect(() => {
    if (!ask) return;
    let isOver = false;
    const once = async () => {
      try {
        const answer = await ask();
        if (!isOver) set({ key, answer });
      } catch (error) {
        if (!isOver) set({ key, error });
      }
    };
    void once();
    const timer = everyMs ? setInterval(() => void once(), everyMs) : 0;
    return () => {
      isOver = true;
      clearInterval(timer);
    };
  }, [key, everyMs, ask === null]);
  return state.key === key ? state : {};
}
