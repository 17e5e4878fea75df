// The curves of what controllers report: one chart for each name, with a line for each run.

import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { type App, useApp } from "./app";
import { css, jobColour } from "./colours";
import { short } from "./format";
import type { Curve, Model } from "./model";

const [WIDE_PX, LOW_PX, HIGH_PX] = [300, 130, 220];
const MOST_IN_CARD = 8;
/** Runs that are shown before anybody has chosen. */
const FIRST_RUNS = 8;
/** The lines of a job's runs, newest first. */
const DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3]];

interface Line {
  label: string;
  colour: string;
  dash: number[];
  curve: Curve;
}

interface Run {
  /** Its key in `Model.curves`. */
  key: string;
  label: string;
  colour: string;
  dash: number[];
}

/** All runs that have curves, the one that reported first in front. */
function runs({ model, isDark }: App): Run[] {
  const keys = [...model.curves.keys()];
  return keys.map((key) => {
    const [job = "", run = ""] = key.split(" ");
    const later = keys.slice(keys.indexOf(key) + 1).filter((other) => other.split(" ")[0] === job);
    return {
      key,
      label: `${job.split(".").slice(1).join(".")}${run && ` ${run}`}`,
      colour: css(jobColour(Math.max(0, model.jobs.indexOf(job)), isDark)),
      dash: DASHES[Math.min(later.length, DASHES.length - 1)]!,
    };
  });
}

function lines(model: Model, shown: Run[], name: string): Line[] {
  return shown.flatMap(({ key, ...run }) => {
    const curve = model.curves.get(key)?.get(name);
    return curve ? [{ ...run, curve }] : [];
  });
}

function names(model: Model, shown: Run[]): string[] {
  return [...new Set(shown.flatMap(({ key }) => [...(model.curves.get(key)?.keys() ?? [])]))];
}

/** The curves of one run. */
export function RunCurves({ app, run }: { app: App; run: string }) {
  const shown = runs(app).filter(({ key }) => key === run);
  const all = names(app.model, shown);
  if (!all.length) return null;
  return (
    <div class="curves">
      {all.slice(0, MOST_IN_CARD).map((name) => (
        <Chart key={name} app={app} name={name} lines={lines(app.model, shown, name)} group={run} heightPx={LOW_PX} />
      ))}
      <a href="#curves">{all.length > MOST_IN_CARD ? `All ${all.length} curves` : "Compare runs"}</a>
    </div>
  );
}

/** The curves of all runs, or of those that are chosen. */
export function Curves({ app }: { app: App }) {
  useApp(app);
  const [chosen, setChosen] = useState(new Map<string, boolean>());
  const [sought, setSought] = useState("");
  const all = runs(app);
  const isShown = (run: Run, at: number) => chosen.get(run.key) ?? at >= all.length - FIRST_RUNS;
  const shown = all.filter(isShown);
  const found = names(app.model, shown).filter((name) => name.toLowerCase().includes(sought.toLowerCase()));
  return (
    <section class="page" aria-label="Curves">
      <div class="filter">
        <input
          type="search" placeholder="Filter by name" aria-label="Filter curves" value={sought}
          onInput={(event) => setSought(event.currentTarget.value)}
        />
        {all.map((run, at) => (
          <label key={run.key}>
            <input
              type="checkbox" checked={isShown(run, at)}
              onChange={(event) => setChosen(new Map(chosen).set(run.key, event.currentTarget.checked))}
            />
            <i class="dot" style={{ background: run.colour }} />{run.label}
          </label>
        ))}
        <span class="muted">drag: zoom; double click: everything</span>
      </div>
      {found.map((name) => (
        <article class="card" key={name}>
          <Chart app={app} name={name} lines={lines(app.model, shown, name)} group="all" heightPx={HIGH_PX} />
        </article>
      ))}
      {!found.length && <p class="empty">{all.length ? "Nothing matches." : "No controller has reported a value yet."}</p>}
    </section>
  );
}

/** One chart. Charts of a group share the pointer and the zoom. */
function Chart({ app, name, lines, group, heightPx }: { app: App; name: string; lines: Line[]; group: string; heightPx: number }) {
  const element = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const look = JSON.stringify([app.isDark, lines.map(({ label, colour, dash }) => [label, colour, dash])]);
  const state = lines.map(({ curve }) => curve.version).join();
  useEffect(() => {
    const box = element.current!;
    const made = new uPlot(options(app, lines, group, heightPx), joined(lines), box);
    plot.current = made;
    const watch = new ResizeObserver(() => made.setSize({ width: box.clientWidth, height: heightPx }));
    watch.observe(box);
    return () => {
      watch.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [look, group, heightPx]);
  useEffect(() => {
    if (plot.current) update(plot.current, joined(lines));
  }, [state, look]);
  const last = lines.map(({ label, curve }) => `${label}: ${short(curve.values[curve.values.length - 1]!)} at step ${curve.steps[curve.steps.length - 1]}`);
  return (
    <figure aria-label={`${name}. ${last.join("; ")}`}>
      <figcaption><span>{name}</span>{lines.length === 1 && <b>{short(lines[0]!.curve.values[lines[0]!.curve.values.length - 1]!)}</b>}</figcaption>
      <div ref={element} />
    </figure>
  );
}

/** The charts that show only a part of their steps. */
const zoomed = new WeakSet<uPlot>();

/** Give a chart new points; a part that was zoomed into stays in view. */
function update(plot: uPlot, data: uPlot.AlignedData): void {
  const isZoomed = zoomed.has(plot);
  plot.setData(data, !isZoomed);
  if (isZoomed) plot.redraw();
}

/** Called once a scale has changed. uPlot changes scales later than data, which `update` cannot compare. */
function scaled(plot: uPlot, key: string): void {
  if (key !== "x") return;
  const steps = plot.data[0];
  const { min, max } = plot.scales.x!;
  const hidesSome = steps.length > 0 && min != null && max != null && (min > steps[0]! || max < steps[steps.length - 1]!);
  if (hidesSome) zoomed.add(plot);
  else zoomed.delete(plot);
}

function joined(lines: Line[]): uPlot.AlignedData {
  const tables = lines.map(({ curve }) => [curve.steps, curve.values] as uPlot.AlignedData);
  return tables.length > 1 ? uPlot.join(tables) : tables[0] ?? [[]];
}

function options(app: App, lines: Line[], group: string, heightPx: number): uPlot.Options {
  const { muted, line } = app.theme;
  const axis = { stroke: muted, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1, size: 4 }, font: "11px system-ui", gap: 3 };
  return {
    width: WIDE_PX,
    height: heightPx,
    scales: { x: { time: false } },
    axes: [{ ...axis, size: 24 }, { ...axis, size: 52, values: (_, ticks) => ticks.map(short) }],
    cursor: { sync: { key: group }, points: { size: 6 } },
    hooks: { setScale: [scaled] },
    legend: { show: true, markers: { width: 2 } },
    series: [
      { label: "step", value: (_, step) => (step == null ? "–" : String(step)) },
      ...lines.map(({ label, colour, dash }) => ({
        label, dash, stroke: colour, width: 1.6, spanGaps: true,
        value: (_: uPlot, value: number | null) => (value == null ? "–" : short(value)),
      })),
    ],
  };
}
