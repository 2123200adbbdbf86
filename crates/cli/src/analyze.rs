//! `skysail analyze`: all mistakes in configuration files, with stable codes, as text, JSON or SARIF.

mod sarif;
mod suppress;

use std::{collections::BTreeMap, env, path::PathBuf, time::SystemTime};

use anyhow::bail;
use serde::Serialize;
use skysail_core::{logging::printable, stdio};
use skysail_model::{Code, Diagnostic, Severity};
use skysail_sandbox::CheckResult;

use crate::{exit, input::Input};
use suppress::Suppression;

/// The page with a section for each code.
const PAGE: &str = include_str!("../../../docs/analysis.md");

/// Arguments of `skysail analyze`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Nothing is run, and no cluster is read. Analyze rules together with the Services and Deployments that they are for: \
references to objects are checked only where objects of their kind are among the files.\n\n\
The annotation galley.istio.io/analyze-suppress of an object, with codes or *, suppresses findings about it.\n\n\
Exit codes:\n  \
0    no finding of the severity of --fail-on, or above it\n  \
1    such findings\n  \
2    wrong usage, or a file that cannot be read")]
pub(crate) struct AnalyzeArgs {
    /// Folders or files of Kubernetes and Istio YAML; - is standard input.
    #[arg(value_name = "PATH", required_unless_present_any = ["filenames", "explain"])]
    paths: Vec<PathBuf>,
    /// The same as PATH, as for kubectl; may be given several times.
    #[arg(short, long = "filename", value_name = "PATH")]
    filenames: Vec<PathBuf>,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
    /// Lowest severity that makes the exit code 1.
    #[arg(long, value_enum, default_value_t)]
    fail_on: Threshold,
    /// Code of Skysail or istioctl whose findings are left out. KIND NAME.NAMESPACE restricts this to an object; *
    /// stands for any text, such as in "SKY0613=Gateway *.edge". May be given several times.
    #[arg(long, value_name = "CODE[=KIND NAME.NAMESPACE]")]
    suppress: Vec<Suppression>,
    /// Print the documentation of a code: meaning, example and fix.
    #[arg(long, value_name = "CODE", conflicts_with_all = ["paths", "filenames"])]
    explain: Option<String>,
}

/// Output format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// Sentences; errors before warnings.
    #[default]
    Text,
    /// JSON, for scripts.
    Json,
    /// SARIF 2.1.0, for code scanning.
    Sarif,
}

/// Lowest severity that counts as a failure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum Threshold {
    /// Errors only.
    #[default]
    Error,
    /// Errors and warnings.
    Warning,
    /// All findings.
    Info,
}

/// JSON output; `docs/scripting.md` lists the fields.
#[derive(Serialize)]
struct AnalyzeReport<'a> {
    failed: bool,
    errors: usize,
    warnings: usize,
    infos: usize,
    suppressed: usize,
    objects: &'a BTreeMap<String, usize>,
    findings: Vec<Entry<'a>>,
}

#[derive(Serialize)]
struct Entry<'a> {
    #[serde(flatten)]
    finding: &'a Diagnostic,
    name: &'a str,
    istio: &'a [&'a str],
}

impl<'a> Entry<'a> {
    fn of(finding: &'a Diagnostic) -> Self {
        Self { finding, name: finding.code.name(), istio: finding.code.istio() }
    }
}

/// Analyzes the files and prints the findings.
pub(crate) fn run(args: AnalyzeArgs) -> anyhow::Result<u8> {
    if let Some(code) = &args.explain {
        stdio::print(explain(code)?)?;
        return Ok(exit::OK);
    }
    let Input { paths, text } = Input::read(args.paths.into_iter().chain(args.filenames).collect())?;
    let mut result = CheckResult::analyze(&paths, text.as_deref(), SystemTime::now())?;
    let all = result.findings.len();
    result.findings.retain(|finding| !args.suppress.iter().any(|of| of.covers(finding)));
    let suppressed = all - result.findings.len();
    shorten(&mut result.findings);
    result.findings.sort_by(|one, other| one.severity.cmp(&other.severity).then_with(|| one.cmp(other)));
    let failed = result.findings.iter().any(|finding| args.fail_on.includes(finding.severity));
    let unreadable = result.findings.iter().any(|finding| finding.code == Code::Unreadable);
    match args.output {
        Format::Text => print(&result, suppressed, args.fail_on)?,
        Format::Json => {
            let report = AnalyzeReport {
                failed,
                errors: result.count(Severity::Error),
                warnings: result.count(Severity::Warning),
                infos: result.count(Severity::Info),
                suppressed,
                objects: result.kinds(),
                findings: result.findings.iter().map(Entry::of).collect(),
            };
            stdio::print(serde_json::to_string_pretty(&report)?)?;
        }
        Format::Sarif => stdio::print(serde_json::to_string_pretty(&sarif::log(&result.findings))?)?,
    }
    Ok(if unreadable { exit::NOT_DONE } else { exit::of(!failed) })
}

impl Threshold {
    fn includes(self, severity: Severity) -> bool {
        let lowest = match self {
            Self::Error => Severity::Error,
            Self::Warning => Severity::Warning,
            Self::Info => Severity::Info,
        };
        severity <= lowest
    }
}

/// Prints the findings: a line with severity, code, place, object and field, then the message and the remedy. Notes are
/// printed only with `--fail-on info`.
fn print(result: &CheckResult, suppressed: usize, fail_on: Threshold) -> anyhow::Result<()> {
    let shown = |finding: &&Diagnostic| finding.severity != Severity::Info || fail_on == Threshold::Info;
    for finding in result.findings.iter().filter(shown) {
        let Diagnostic { severity, code, message, remedy, .. } = finding;
        let parts = [place(finding), finding.object.clone(), finding.field.clone()];
        let parts: Vec<String> = parts.into_iter().filter(|part| !part.is_empty()).collect();
        stdio::print(printable(format_args!("{severity} {code}: {}", parts.join(": "))))?;
        stdio::print(printable(format_args!("    {message}")))?;
        if !remedy.is_empty() {
            stdio::print(printable(format_args!("    remedy: {remedy}")))?;
        }
    }
    let mut summary = result.summary();
    let notes = result.count(Severity::Info);
    if notes > 0 {
        let hidden = if fail_on == Threshold::Info { "" } else { " (shown with --fail-on info)" };
        summary = format!("{summary}, {notes} {}{hidden}", if notes == 1 { "note" } else { "notes" });
    }
    if suppressed > 0 {
        summary = format!("{summary}, {suppressed} suppressed");
    }
    if let Some(first) = result.findings.iter().find(shown) {
        summary = format!("{summary}; `skysail analyze --explain {}` explains a code", first.code);
    }
    stdio::print(printable(summary))?;
    Ok(())
}

/// Returns file and line.
fn place(finding: &Diagnostic) -> String {
    if finding.line > 0 { format!("{}:{}", finding.file, finding.line) } else { finding.file.clone() }
}

/// Makes the paths of files relative to the working directory, where they are below it.
fn shorten(findings: &mut [Diagnostic]) {
    let Ok(folder) = env::current_dir().and_then(|folder| folder.canonicalize()) else { return };
    let Some(prefix) = folder.to_str().map(|folder| format!("{}/", folder.trim_end_matches('/'))) else {
        return;
    };
    for finding in findings {
        for text in [&mut finding.file, &mut finding.message] {
            if text.contains(&prefix) {
                *text = text.replace(&prefix, "");
            }
        }
    }
}

/// Returns the section of the page about a code, named by its number, its name, or a code of `istioctl`. If a code of
/// `istioctl` stands for several codes, returns the list of these.
fn explain(text: &str) -> anyhow::Result<String> {
    let of_istio = |code: &&Code| code.istio().iter().any(|istio| istio.eq_ignore_ascii_case(text));
    let codes: Vec<Code> = match text.parse() {
        Ok(code) => vec![code],
        Err(_) => Code::ALL.iter().filter(of_istio).copied().collect(),
    };
    match codes[..] {
        [] => bail!(
            "unknown code {text}: codes go from {} to {}, and docs/analysis.md lists them",
            first(),
            last()
        ),
        [code] => Ok(section(code).to_owned()),
        _ => {
            let line = |code: &Code| format!("{code} {}: {}", code.name(), code.meaning());
            Ok(codes.iter().map(line).collect::<Vec<_>>().join("\n"))
        }
    }
}

fn first() -> &'static str {
    Code::ALL.first().map_or("", |code| code.id())
}

fn last() -> &'static str {
    Code::ALL.last().map_or("", |code| code.id())
}

/// Returns the section of the page about a code. A test proves that each code has one.
fn section(code: Code) -> &'static str {
    let heading = format!("\n### {code} ");
    let Some(at) = PAGE.find(&heading) else { return code.meaning() };
    let rest = &PAGE[at + 1..];
    let end = ["\n### ", "\n## "].iter().filter_map(|next| rest.find(next)).min().unwrap_or(rest.len());
    rest[..end].trim_end()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_its_section() {
        for code in Code::ALL {
            let section = section(*code);
            assert!(section.contains(code.name()) && section.contains(code.fix()), "{code}: {section}");
        }
        assert!(explain("sky0601").is_ok_and(|text| text.contains("UnknownHost")));
        assert!(explain("IST0101").is_ok_and(|text| text.contains("SKY0606")));
        assert!(explain("SKY9999").is_err());
    }

    #[test]
    fn a_threshold_includes_what_is_above_it() {
        assert!(
            Threshold::Warning.includes(Severity::Error) && Threshold::Warning.includes(Severity::Warning)
        );
        assert!(
            !Threshold::Warning.includes(Severity::Info) && !Threshold::Error.includes(Severity::Warning)
        );
    }
}
