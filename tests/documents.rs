//! Checks that the names in documents exist: the threat model's tests, the targets of links, the tool's
//! subcommands and options, and the messages that troubleshooting explains. Pages keep their size and form,
//! and the README's figures are those of `docs/performance.md`.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Subcommands whose options documents mention without the command.
const SUBCOMMANDS: [&str; 40] = [
    "up",
    "analyze",
    "inject",
    "install",
    "uninstall",
    "check",
    "image",
    "call",
    "explain",
    "dashboard",
    "port-forward",
    "workload echo",
    "exec",
    "load",
    "load report",
    "load server",
    "load ui",
    "logs",
    "status",
    "ca status",
    "ca rotate",
    "control",
    "proxy",
    "proxy intercept",
    "bench latency",
    "bench compare",
    "bench control",
    "bench diff",
    "bench dns",
    "bench gateway",
    "bench graph convert kubernetes",
    "bench graph generate star",
    "bench graph generate tree",
    "bench graph serve",
    "bench instructions",
    "bench micro",
    "bench report",
    "bench run",
    "bench sign",
    "bench size",
];
/// Options of cargo and istioctl that documents name without the program.
const FOREIGN: [&str; 4] = ["--privileged", "--profile", "--release", "--xds-address"];
/// Maximum columns of a line in `README.md` and `ARCHITECTURE.md`.
const MAX_COLUMNS: usize = 120;
/// Maximum lines of a paragraph or list item.
const MAX_PARAGRAPH: usize = 5;
/// The project's folder.
const PROJECT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

#[test]
fn the_threat_model_names_tests_that_exist() {
    let text = fs::read_to_string(Path::new(PROJECT).join("docs/threat-model.md")).unwrap();
    // Every second part is between backquotes.
    let named: Vec<_> = text.split('`').skip(1).step_by(2).filter(|name| name.contains(".rs")).collect();
    assert!(named.len() > 30, "{named:?}");
    let missing: Vec<_> = named.iter().filter(|name| !exists(name)).collect();
    assert!(missing.is_empty(), "docs/threat-model.md names tests that are not there: {missing:#?}");
}

/// Returns whether a file exists (`proxy/tests/limits.rs`), with the function (`::name`) if there is one. The document
/// omits `crates/`.
fn exists(named: &str) -> bool {
    let (file, function) = named.split_once("::").map_or((named, None), |(file, name)| (file, Some(name)));
    let paths = [Path::new(PROJECT).join(file), Path::new(PROJECT).join("crates").join(file)];
    let Some(text) = paths.iter().find_map(|path| fs::read_to_string(path).ok()) else { return false };
    function.is_none_or(|name| text.contains(&format!("fn {name}(")))
}

#[test]
fn links_lead_to_files_and_headings_that_exist() {
    let (mut links, mut broken) = (0, Vec::new());
    for document in documents() {
        let text = Text::of(&document);
        let folder = document.parent().unwrap();
        for target in
            text.prose.iter().flat_map(|line| targets(line)).filter(|target| !target.contains("://"))
        {
            links += 1;
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            let file = if file.is_empty() { document.clone() } else { folder.join(file) };
            if !file.exists() || !(anchor.is_empty() || Text::of(&file).anchors().contains(anchor)) {
                broken.push(format!("{}: {target}", document.display()));
            }
        }
    }
    assert!(links > 60, "{links}");
    assert!(broken.is_empty(), "links that lead nowhere: {broken:#?}");
}

#[test]
fn commands_and_options_in_documents_exist() {
    let mut tool = Tool::default();
    let (mut commands, mut unknown) = (0, Vec::new());
    // The command reference is generated from the tool.
    for document in documents().into_iter().filter(|document| !document.ends_with("docs/commands.md")) {
        for code in Text::of(&document).code {
            let alone = (code.starts_with("--") && !code.starts_with("---") && code != "-->")
                .then(|| code.split([' ', '=']).next())
                .flatten();
            if let Some(option) = alone.filter(|option| !FOREIGN.contains(option) && !tool.has_option(option))
            {
                unknown.push(format!("{}: {option}", document.display()));
            }
            for call in calls(&code) {
                commands += 1;
                unknown.extend(
                    tool.unknown(&call).map(|what| format!("{}: {code}: {what}", document.display())),
                );
            }
        }
    }
    assert!(commands > 100, "{commands}");
    assert!(unknown.is_empty(), "documents name what the tool does not have: {unknown:#?}");
}

#[test]
fn missing_names_are_found() {
    let call = |text: &str| calls(text).iter().map(|call| Tool::default().unknown(call)).collect::<Vec<_>>();
    assert_eq!(call("$ skysail up k8s/ --for=1s | jq"), [None]);
    assert_eq!(call("test \"$(skysail call front http://x/ --nothing)\""), [Some("--nothing".to_owned())]);
    assert_eq!(call("skysail raise k8s/"), [Some("raise".to_owned())]);
    assert_eq!(call("skysail bench latency --sidecars 3"), [Some("--sidecars".to_owned())]);
    assert_eq!(call("skysail exec front -- curl --silent"), [None]);
    assert_eq!(targets("a [b](c.md) and [`d`](e.md#f)"), ["c.md", "e.md#f"]);
    assert_eq!(anchor("`skysail up`, or: What's new?"), "skysail-up-or-whats-new");
}

#[test]
fn the_first_pages_are_short() {
    for (page, max_lines) in [("README.md", 120), ("ARCHITECTURE.md", 250)] {
        let text = fs::read_to_string(Path::new(PROJECT).join(page)).unwrap();
        assert!(text.lines().count() <= max_lines, "{page} has more than {max_lines} lines");
        let wide: Vec<_> = text.lines().filter(|line| line.chars().count() > MAX_COLUMNS).collect();
        assert!(wide.is_empty(), "{page} has lines of more than {MAX_COLUMNS} columns: {wide:#?}");
    }
}

#[test]
fn recipes_name_files_that_exist() {
    let project = Path::new(PROJECT);
    let text = fs::read_to_string(project.join("CONTRIBUTING.md")).unwrap();
    let named = text.split('`').skip(1).step_by(2);
    let folders = ["crates/", "fuzz/", "tests/"];
    let paths: Vec<_> = named
        .filter(|name| folders.iter().any(|folder| name.starts_with(folder)) && !name.contains("NAME"))
        .collect();
    assert!(paths.len() > 15, "{paths:?}");
    let missing: Vec<_> = paths.iter().filter(|path| !project.join(path).exists()).collect();
    assert!(missing.is_empty(), "CONTRIBUTING.md names what is not there: {missing:#?}");
}

#[test]
fn the_architecture_names_crates_and_modules_that_exist() {
    let crates = Path::new(PROJECT).join("crates");
    let text = fs::read_to_string(Path::new(PROJECT).join("ARCHITECTURE.md")).unwrap();
    let named = text.split('`').skip(1).step_by(2);
    let paths: Vec<_> = named
        .filter_map(|name| match (name.strip_prefix("crates/"), name.split_once("::")) {
            (Some(path), _) => Some(crates.join(path)),
            (None, Some((folder, module))) => Some(crates.join(folder).join("src").join(module)),
            (None, None) => None,
        })
        // The first part may also be a module or a type.
        .filter(|path| path.ancestors().any(|folder| folder.parent() == Some(&crates) && folder.is_dir()))
        .collect();
    assert!(paths.len() > 20, "{paths:?}");
    let missing: Vec<_> =
        paths.iter().filter(|path| !path.exists() && !path.with_extension("rs").exists()).collect();
    assert!(missing.is_empty(), "ARCHITECTURE.md names what is not there: {missing:#?}");
}

#[test]
fn pages_say_for_whom_they_are_and_have_short_paragraphs() {
    let mut findings = Vec::new();
    for document in pages() {
        let text = fs::read_to_string(&document).unwrap();
        let first = text.split("\n\n").nth(1).unwrap_or_default();
        if !first.starts_with("This page is for ") {
            findings.push(format!("{}: does not begin with \"This page is for …\"", document.display()));
        }
        let mut lines = 0;
        let mut is_fenced = false;
        for line in text.lines() {
            is_fenced ^= line.starts_with("```");
            let begins =
                line.trim_start().starts_with(['*', '-', '1', '2', '3', '4', '5', '6', '7', '8', '9']);
            let counts = !is_fenced && !line.is_empty() && !line.starts_with(['|', '`', '#', ' ', '<']);
            lines = match (counts || line.starts_with("  ") && lines > 0, begins) {
                (true, true) => 1,
                (true, false) => lines + 1,
                (false, _) => 0,
            };
            if lines == MAX_PARAGRAPH + 1 {
                findings.push(format!("{}: a paragraph is too long: {line}", document.display()));
            }
        }
    }
    assert!(findings.is_empty(), "{findings:#?}");
}

#[test]
fn the_summary_lists_every_page() {
    let docs = Path::new(PROJECT).join("docs");
    let summary = fs::read_to_string(docs.join("SUMMARY.md")).unwrap();
    let listed: BTreeSet<_> = summary.lines().flat_map(targets).map(|target| docs.join(target)).collect();
    let pages: BTreeSet<_> = pages().into_iter().filter(|page| page.starts_with(&docs)).collect();
    assert_eq!(listed, pages, "docs/SUMMARY.md and the pages in docs differ");
}

#[test]
fn figures_of_the_readme_are_those_of_the_performance_page() {
    let read = |page: &str| fs::read_to_string(Path::new(PROJECT).join(page)).unwrap();
    let (readme, performance) = (read("README.md"), read("docs/performance.md"));
    let table = readme.split_once("## What it costs").unwrap().1;
    let rows: Vec<_> =
        table.lines().take_while(|line| !line.starts_with("##")).filter_map(row).skip(1).collect();
    assert!(rows.len() >= 3, "{rows:?}");
    for (label, figures) in rows {
        // Rows in comments have placeholders.
        let mut rows = performance.lines().filter(|line| !line.contains('{')).filter_map(row);
        let of_page = rows.find(|(other, _)| *other == label);
        let (_, measured) = of_page.unwrap_or_else(|| panic!("docs/performance.md has no row {label:?}"));
        // Columns: Skysail, Envoy, HAProxy. A range follows the median.
        for (figure, measured) in figures.iter().zip(&measured) {
            let median = measured.split(' ').next();
            assert_eq!(Some(*figure), median, "README.md, {label}: docs/performance.md has {measured}");
        }
    }
    let commit = table.split_once("commit ").unwrap().1.split([',', ' ']).next().unwrap();
    assert!(performance.contains(&format!("| commit | {commit}, ")), "README.md names commit {commit}");
}

/// The label and the figures of a table's row.
fn row(line: &str) -> Option<(&str, Vec<&str>)> {
    let mut cells = line.strip_prefix("| ")?.strip_suffix(" |")?.split(" | ");
    Some((cells.next()?, cells.collect()))
}

#[test]
fn troubleshooting_explains_messages_that_exist() {
    let project = Path::new(PROJECT);
    let mut sources = String::new();
    for path in files(&project.join("crates"), "rs") {
        // A message may be broken over lines.
        let text = fs::read_to_string(path).unwrap();
        sources.extend(text.split('\n').map(|line| line.trim().trim_end_matches('\\')));
    }
    let page = fs::read_to_string(project.join("docs/troubleshooting.md")).unwrap();
    let symptoms = page.lines().filter_map(row).filter(|(symptom, _)| symptom.contains('`'));
    let messages = symptoms.flat_map(|(symptom, _)| symptom.split('`').skip(1).step_by(2));
    let parts = messages.flat_map(|message| message.split('…')).map(str::trim);
    let parts: Vec<_> = parts.filter(|part| part.len() > 4 && part.contains(' ')).collect();
    assert!(parts.len() > 40, "{parts:?}");
    let missing: Vec<_> = parts.iter().filter(|part| !sources.contains(**part)).collect();
    assert!(missing.is_empty(), "docs/troubleshooting.md explains what no program prints: {missing:#?}");
}

/// The documents with links and commands: all Markdown for users and contributors.
fn documents() -> Vec<PathBuf> {
    let project = Path::new(PROJECT);
    let mut documents = pages();
    documents.extend([
        project.join("README.md"),
        project.join("SECURITY.md"),
        project.join("fuzz/README.md"),
        project.join("docs/SUMMARY.md"),
    ]);
    documents.extend(files(&project.join("benchmarks/results"), "md"));
    documents.extend(files(&project.join("examples"), "md"));
    documents
}

/// ARCHITECTURE, CONTRIBUTING and the pages of the book.
fn pages() -> Vec<PathBuf> {
    let project = Path::new(PROJECT);
    let mut pages = files(&project.join("docs"), "md");
    pages.retain(|page| !page.ends_with("SUMMARY.md"));
    pages.extend(["ARCHITECTURE.md", "CONTRIBUTING.md"].map(|page| project.join(page)));
    pages
}

/// All files with this extension in a folder and below it.
fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|found| found == extension) {
                files.push(path);
            }
        }
    }
    files
}

/// A Markdown document: lines of prose without code, and all code, by line or span.
#[derive(Default)]
struct Text {
    prose: Vec<String>,
    code: Vec<String>,
}

impl Text {
    fn of(document: &Path) -> Self {
        let mut text = Self::default();
        let mut is_fenced = false;
        for line in fs::read_to_string(document).unwrap().lines() {
            if line.trim_start().starts_with("```") {
                is_fenced = !is_fenced;
            } else if is_fenced || line.starts_with("    ") {
                text.code.push(line.trim().to_owned());
            } else {
                text.prose.push(line.split('`').step_by(2).collect());
                text.code.extend(line.split('`').skip(1).step_by(2).map(str::to_owned));
                text.headings(line);
            }
        }
        text
    }

    /// Keeps a heading with its code, which is part of its anchor.
    fn headings(&mut self, line: &str) {
        if line.starts_with('#')
            && let Some(last) = self.prose.last_mut()
        {
            line.clone_into(last);
        }
    }

    /// Returns the anchors of the headings, as GitHub forms them.
    fn anchors(&self) -> BTreeSet<String> {
        let titles = self.prose.iter().filter(|line| line.starts_with('#'));
        titles.map(|line| anchor(line.trim_start_matches('#').trim())).collect()
    }
}

fn anchor(title: &str) -> String {
    let kept = title.to_lowercase().replace(' ', "-");
    kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, '-' | '_')).collect()
}

/// Returns the targets of links in a line.
fn targets(line: &str) -> Vec<&str> {
    line.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0)).collect()
}

/// A command line of the tool: the words after its name.
type Call = Vec<String>;

/// Returns the tool's command lines in a line of code.
fn calls(code: &str) -> Vec<Call> {
    let mut calls: Vec<Call> = Vec::new();
    let mut is_within = false;
    for word in code.split_whitespace() {
        let word = word.trim_matches(['"', '\'', '(', ')', ',', ';']);
        let name = word.rsplit(['/', '(']).next().unwrap_or_default();
        match (name, word) {
            ("skysail", _) => {
                calls.push(Vec::new());
                is_within = true;
            }
            // The following words belong to another command.
            (_, "|" | "||" | "&&" | "&" | ">" | "2>" | "#" | "--") => is_within = false,
            _ if is_within => calls.iter_mut().last().into_iter().for_each(|call| call.push(word.to_owned())),
            _ => {}
        }
    }
    // The name alone, or as a word of a sentence, is no command line.
    calls.retain(|call| {
        call.first().is_some_and(|word| word.chars().all(|c| c.is_ascii_lowercase() || c == '-'))
    });
    calls
}

fn has_word(help: &str, option: &str) -> bool {
    help.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-')).any(|word| word == option)
}

/// The tool's help texts, by the words before `--help`.
#[derive(Default)]
struct Tool(BTreeMap<Vec<String>, String>);

impl Tool {
    /// Returns the first word of a command line that the tool does not know.
    fn unknown(&mut self, call: &Call) -> Option<String> {
        let mut subcommand = Vec::new();
        for word in call {
            let deeper = [&subcommand[..], std::slice::from_ref(word)].concat();
            let usage = format!("Usage: skysail {} ", deeper.join(" "));
            if word.starts_with('-') || !self.help(&deeper).replace('\n', " ").contains(&usage) {
                break;
            }
            subcommand = deeper;
        }
        if subcommand.is_empty() {
            return call.first().filter(|word| !word.starts_with('-')).cloned();
        }
        let help = self.help(&subcommand);
        let options = call.iter().filter(|word| word.starts_with("--"));
        let mut options = options.filter_map(|word| word.split('=').next());
        options.find(|option| !has_word(help, option)).map(str::to_owned)
    }

    /// Returns whether any subcommand has the option.
    fn has_option(&mut self, option: &str) -> bool {
        SUBCOMMANDS.iter().any(|words| {
            let words: Vec<String> = words.split(' ').map(str::to_owned).collect();
            let help = self.help(&words);
            assert!(help.contains("Usage: "), "{words:?}");
            has_word(help, option)
        })
    }

    /// Returns a help text; it is empty if there is no such subcommand.
    fn help(&mut self, words: &[String]) -> &str {
        self.0.entry(words.to_vec()).or_insert_with(|| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_skysail"));
            let output = command.args(words).arg("--help").output().unwrap();
            String::from_utf8(output.stdout).unwrap()
        })
    }
}
