// Builds the page into the Python package, under names that do not change, and leaves the hash of
// what it was built from beside it: a test says when the two are apart.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { defineConfig } from "vite";

const OUT = "../phaseloom/console/static";
const SOURCES = ["index.html", "package-lock.json", "package.json", "tsconfig.json", "vite.config.js"];
const PALETTE = "../../../libs/common/phaseloom/common/observability/palette.json";

function sourcesHash() {
  const own = readdirSync("src").map((name) => join("src", name));
  const hash = createHash("sha256");
  for (const name of [...SOURCES, ...own].sort()) {
    hash.update(`${name}\n`).update(readFileSync(name));
  }
  return hash.update(readFileSync(PALETTE)).digest("hex");
}

/** The licences of the packages that are part of the script. */
function licences() {
  const { dependencies } = JSON.parse(readFileSync("package.json", "utf8"));
  return Object.keys(dependencies)
    .map((name) => `${name}\n\n${readFileSync(join("node_modules", name, "LICENSE"), "utf8").trim()}\n`)
    .join("\n\n");
}

export default defineConfig({
  base: "./",
  esbuild: { jsx: "automatic", jsxImportSource: "preact" },
  build: {
    outDir: OUT,
    emptyOutDir: true,
    target: "es2022",
    modulePreload: false,
    rollupOptions: {
      output: {
        entryFileNames: "console.js",
        assetFileNames: "console[extname]",
        inlineDynamicImports: true,
      },
    },
  },
  plugins: [
    {
      name: "plain-tags",
      transformIndexHtml: {
        order: "post",
        handler: (html) =>
          html
            .replace(/\s*<script type="module"[^>]*><\/script>/, "")
            .replace(/\s*<link rel="stylesheet"[^>]*>/, "")
            .replace("</head>", '  <link rel="stylesheet" href="static/console.css">\n</head>')
            .replace(
              "</body>",
              '  <script type="module" src="static/console.js"></script>\n</body>',
            ),
      },
    },
    {
      name: "licences",
      closeBundle: () => writeFileSync(join(OUT, "LICENSES.txt"), licences()),
    },
    {
      name: "sources-hash",
      closeBundle: () => writeFileSync(join(OUT, "sources.sha256"), `${sourcesHash()}\n`),
    },
  ],
});
