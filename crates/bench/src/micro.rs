//! `skysail bench micro`: compares times of single functions with a baseline that is kept with the source.
//!
//! Criterion measures the functions in the `benches` folders of the crates. `bench instructions` counts the work of whole
//! requests and does not depend on the machine; times of functions do, and show which part became slower. Medians are
//! therefore compared on the same CPU model alone. On another model, the ratios are reported and decide nothing.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use skysail_core::stdio;

use crate::{
    layout, results,
    stage::{self, deduplicate},
};

/// Settings of `skysail bench micro`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct MicroArgs {
    /// Folder in which Criterion stored its measurements: `criterion` in the target folder of cargo.
    #[arg(long, value_name = "FOLDER", default_value = "target/criterion")]
    criterion: PathBuf,

    /// Baseline to compare with.
    #[arg(long, value_name = "FILE", default_value = "benchmarks/micro.json")]
    baseline: PathBuf,

    /// Crates to compare, such as http. Default: all.
    #[arg(long, value_name = "CRATE,…", value_delimiter = ',')]
    only: Vec<String>,

    /// Fail if a median is more than this percentage above the baseline, on the CPU model of the baseline.
    #[arg(long, value_name = "PERCENT", default_value_t = 25, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    tolerance: u32,

    /// Write the measurements as the new baseline and do not compare them. With --only, those of other crates stay.
    #[arg(long)]
    write: bool,
}

/// The baseline, as `docs/benchmarks.md` describes it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MicroBaseline {
    format: u32,
    /// CPU model of the machine that measured.
    cpu: String,
    benchmarks: MicroTimes,
}

/// Times by name, such as `http/parse_request/10`.
type MicroTimes = BTreeMap<String, MicroTime>;

/// Time of an operation in nanoseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MicroTime {
    median_ns: f64,
    /// Confidence interval of the median, 95 %.
    low_ns: f64,
    high_ns: f64,
    /// Commit of the measured source.
    commit: String,
}

/// Relation of a measurement to the baseline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MicroVerdict {
    /// Within the tolerance.
    Same,
    Slower,
    Faster,
    /// The baseline does not have it.
    New,
    /// The baseline has it, and it was not measured.
    Missing,
}

/// A benchmark of the measurements or of the baseline.
#[derive(Debug)]
struct MicroRow<'a> {
    name: &'a str,
    measured: Option<&'a MicroTime>,
    baseline: Option<&'a MicroTime>,
    verdict: MicroVerdict,
}

/// Format of the baseline.
const FORMAT: u32 = 1;
/// Folder of the latest measurement of a benchmark, in Criterion's folder of the benchmark.
const LATEST: &str = "new";
/// Maximum depth of Criterion's folders: group, function, parameter, measurement.
const MAX_DEPTH: usize = 4;
/// Prefix of the names of packages.
const PACKAGE: &str = "skysail-";

/// Compares the measurements with the baseline, or writes them as the new one. Returns false if a benchmark is slower
/// than it may be, or is only in one of both.
pub(crate) fn run(mut args: MicroArgs) -> anyhow::Result<bool> {
    deduplicate(&mut args.only);
    let cpu = stage::machine(None, &Ok(()), None).cpu;
    let file = &*args.baseline;
    let mut measured = measurements(&args.criterion, &commit(file))?;
    measured.retain(|name, _| is_of(name, &args.only));
    ensure!(
        !measured.is_empty(),
        "{}: no measurements{}; measure first: cargo bench -p {PACKAGE}{}",
        args.criterion.display(),
        if args.only.is_empty() { String::new() } else { format!(" of {}", args.only.join(", ")) },
        args.only.first().map_or("http", String::as_str)
    );
    if args.write {
        write(file, MicroBaseline { format: FORMAT, cpu, benchmarks: measured }, &args.only)?;
        stdio::print(format_args!("The baseline is in {}.", file.display()))?;
        return Ok(true);
    }
    let mut baseline = read(file)?;
    baseline.benchmarks.retain(|name, _| is_of(name, &args.only));
    let rows = compare(&measured, &baseline.benchmarks, args.tolerance);
    let is_judged = baseline.cpu == cpu;
    stdio::print(table(&rows, is_judged))?;
    if !is_judged {
        stdio::print_error(not_judged(file, &baseline.cpu, &cpu));
        return Ok(true);
    }
    rows.iter().filter_map(|row| row.message(file)).for_each(stdio::print_error);
    Ok(!rows.iter().any(MicroRow::is_failure))
}

/// Returns why no time is judged, and how to get a baseline of this machine.
fn not_judged(file: &Path, other: &str, cpu: &str) -> String {
    format!(
        "nothing is judged: {} was measured on another CPU model ({other}; this machine: {cpu}). For a baseline of this \
         machine, check the commit before the change out, measure it with cargo bench --bench micro -p {PACKAGE}http, and \
         write it: bench micro --baseline FILE --only http --write. Then measure the change, and compare: bench micro \
         --baseline FILE --only http",
        file.display()
    )
}

/// Returns whether a benchmark belongs to one of these crates; all do if none is given.
fn is_of(name: &str, crates: &[String]) -> bool {
    crates.is_empty() || crates.iter().any(|of| of == crate_of(name))
}

/// Returns the crate of a benchmark, which is the first part of its name.
fn crate_of(name: &str) -> &str {
    name.split_once('/').map_or(name, |(of, _)| of)
}

/// Returns the measurements in a folder of Criterion.
fn measurements(folder: &Path, commit: &str) -> anyhow::Result<MicroTimes> {
    let mut times = MicroTimes::new();
    collect(folder, MAX_DEPTH, commit, &mut times)
        .with_context(|| format!("cannot read the measurements in {}", folder.display()))?;
    Ok(times)
}

fn collect(folder: &Path, depth: usize, commit: &str, times: &mut MicroTimes) -> anyhow::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if !entry.file_type()?.is_dir() {
            continue;
        }
        let path = entry.path();
        if entry.file_name() == LATEST && path.join("benchmark.json").is_file() {
            let id: CriterionId = json(&path.join("benchmark.json"))?;
            let CriterionEstimates { median } = json(&path.join("estimates.json"))?;
            times.insert(id.full_id, median.time(commit));
        } else if depth > 0 {
            collect(&path, depth - 1, commit, times)?;
        }
    }
    Ok(())
}

/// The part of Criterion's `benchmark.json` that is used.
#[derive(Deserialize)]
struct CriterionId {
    full_id: String,
}

/// The part of Criterion's `estimates.json` that is used.
#[derive(Deserialize)]
struct CriterionEstimates {
    median: CriterionEstimate,
}

#[derive(Deserialize)]
struct CriterionEstimate {
    point_estimate: f64,
    confidence_interval: CriterionInterval,
}

#[derive(Deserialize)]
struct CriterionInterval {
    lower_bound: f64,
    upper_bound: f64,
}

impl CriterionEstimate {
    fn time(&self, commit: &str) -> MicroTime {
        // A tenth of a nanosecond is less than the noise of any measurement.
        let rounded = |nanoseconds: f64| (nanoseconds * 10.0).round() / 10.0;
        let CriterionInterval { lower_bound, upper_bound } = self.confidence_interval;
        MicroTime {
            median_ns: rounded(self.point_estimate),
            low_ns: rounded(lower_bound),
            high_ns: rounded(upper_bound),
            commit: commit.to_owned(),
        }
    }
}

fn json<T: DeserializeOwned>(file: &Path) -> anyhow::Result<T> {
    let text = fs::read(file).with_context(|| file.display().to_string())?;
    serde_json::from_slice(&text).with_context(|| format!("{}: no file of Criterion 0.8", file.display()))
}

fn read(file: &Path) -> anyhow::Result<MicroBaseline> {
    let text = fs::read(file).with_context(|| {
        format!("cannot read the baseline {}; --write makes it from the measurements", file.display())
    })?;
    let baseline: MicroBaseline = serde_json::from_slice(&text)
        .with_context(|| format!("{} is no baseline of bench micro", file.display()))?;
    ensure!(baseline.format == FORMAT, "{}: its format is {}, not {FORMAT}", file.display(), baseline.format);
    Ok(baseline)
}

/// Writes a new baseline. If it has the measurements of some crates only, those of the others are kept.
fn write(file: &Path, mut baseline: MicroBaseline, only: &[String]) -> anyhow::Result<()> {
    if !only.is_empty() && file.exists() {
        let before = read(file)?;
        ensure!(
            before.cpu == baseline.cpu,
            "{} was measured on another CPU model ({}; this machine: {}): measure all crates and leave --only out",
            file.display(),
            before.cpu,
            baseline.cpu
        );
        let kept = before.benchmarks.into_iter().filter(|(name, _)| !is_of(name, only));
        baseline.benchmarks.extend(kept);
    }
    results::check_writable("--baseline", file)?;
    let json = serde_json::to_string_pretty(&baseline)?;
    fs::write(file, format!("{json}\n"))
        .with_context(|| format!("cannot write the baseline to {}", file.display()))
}

/// Returns the commit of the source tree that contains the baseline, and whether other files of the tree have changes: a
/// change and its baseline are one commit, so the baseline is usually written before it.
fn commit(baseline: &Path) -> String {
    let folder = baseline.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = baseline.file_name().and_then(|name| name.to_str());
    stage::commit_of(folder, name).unwrap_or_else(|| "unknown".to_owned())
}

/// Compares measurements with a baseline; the tolerance is in percent. Returns all benchmarks of both, by name.
fn compare<'a>(measured: &'a MicroTimes, baseline: &'a MicroTimes, tolerance: u32) -> Vec<MicroRow<'a>> {
    let only_before = baseline.keys().filter(|name| !measured.contains_key(*name));
    let mut names: Vec<&str> = measured.keys().chain(only_before).map(String::as_str).collect();
    names.sort_unstable();
    let most = 1.0 + f64::from(tolerance) / 100.0;
    let row = |name: &'a str| {
        let (measured, baseline) = (measured.get(name), baseline.get(name));
        let verdict = match (measured, baseline) {
            (Some(_), None) => MicroVerdict::New,
            (None, _) => MicroVerdict::Missing,
            (Some(now), Some(before)) => match now.median_ns / before.median_ns {
                ratio if ratio > most => MicroVerdict::Slower,
                ratio if ratio * most < 1.0 => MicroVerdict::Faster,
                _ => MicroVerdict::Same,
            },
        };
        MicroRow { name, measured, baseline, verdict }
    };
    names.into_iter().map(row).collect()
}

impl MicroRow<'_> {
    fn is_failure(&self) -> bool {
        matches!(self.verdict, MicroVerdict::Slower | MicroVerdict::New | MicroVerdict::Missing)
    }

    /// Returns the measured median divided by that of the baseline.
    fn ratio(&self) -> Option<f64> {
        Some(self.measured?.median_ns / self.baseline?.median_ns)
    }

    /// Returns what deviates and what to do; `None` if nothing does.
    fn message(&self, file: &Path) -> Option<String> {
        let (name, of, file) = (self.name, crate_of(self.name), file.display());
        let update = format!("bench micro --baseline {file} --only {of} --write");
        let percent = 100.0 * (self.ratio().unwrap_or(1.0) - 1.0);
        Some(match self.verdict {
            MicroVerdict::Same => return None,
            MicroVerdict::Slower => format!(
                "{name}: takes {percent:.0}% more time than in {file}; repeat cargo bench -p {PACKAGE}{of} without other \
                 load, then make it faster, or justify it in the commit and update the file: {update}"
            ),
            MicroVerdict::Faster => {
                format!("{name}: takes {:.0}% less time than in {file}; update it: {update}", -percent)
            }
            MicroVerdict::New => format!("{name}: not in {file}; add it: {update}"),
            MicroVerdict::Missing => format!(
                "{name}: not measured; measure it with cargo bench -p {PACKAGE}{of}, or remove it from {file}: {update}"
            ),
        })
    }
}

/// Returns the table. On another CPU model, it judges no times.
fn table(rows: &[MicroRow<'_>], is_judged: bool) -> String {
    let head = ["benchmark", "median", "± %", "baseline", "ratio", "verdict"].map(str::to_owned);
    let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let cells = |row: &MicroRow<'_>| {
        let verdict = match row.verdict {
            MicroVerdict::Same | MicroVerdict::Slower | MicroVerdict::Faster if !is_judged => "not judged",
            MicroVerdict::Same => "same",
            MicroVerdict::Slower => "slower",
            MicroVerdict::Faster => "faster",
            MicroVerdict::New => "new",
            MicroVerdict::Missing => "missing",
        };
        let spread = |time: &MicroTime| {
            format!(
                "{:.1}",
                100.0 * (time.high_ns - time.low_ns) / 2.0 / time.median_ns.max(f64::MIN_POSITIVE)
            )
        };
        vec![
            row.name.to_owned(),
            or_none(row.measured.map(|time| duration(time.median_ns))),
            or_none(row.measured.map(spread)),
            or_none(row.baseline.map(|time| duration(time.median_ns))),
            or_none(row.ratio().map(|ratio| format!("{ratio:.2}"))),
            verdict.to_owned(),
        ]
    };
    layout::tables(1, &head, &rows.iter().map(cells).collect::<Vec<_>>())
}

/// Formats nanoseconds with a suitable unit.
fn duration(nanoseconds: f64) -> String {
    match nanoseconds {
        under if under < 1e3 => format!("{under:.1} ns"),
        under if under < 1e6 => format!("{:.2} µs", under / 1e3),
        other => format!("{:.2} ms", other / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(median_ns: f64) -> MicroTime {
        MicroTime {
            median_ns,
            low_ns: median_ns - 1.0,
            high_ns: median_ns + 1.0,
            commit: "0123abcd".to_owned(),
        }
    }

    fn times(all: &[(&str, f64)]) -> MicroTimes {
        all.iter().map(|(name, median_ns)| ((*name).to_owned(), time(*median_ns))).collect()
    }

    fn verdicts(measured: &[(&str, f64)], baseline: &[(&str, f64)]) -> Vec<(String, MicroVerdict)> {
        let (measured, baseline) = (times(measured), times(baseline));
        let rows = compare(&measured, &baseline, 25);
        rows.iter().map(|row| (row.name.to_owned(), row.verdict)).collect()
    }

    /// Writes the files of a benchmark as Criterion does.
    fn measure(folder: &Path, name: &str, median_ns: f64) {
        let estimate = |at: f64| {
            serde_json::json!({
                "confidence_interval": {"confidence_level": 0.95, "lower_bound": at - 1.0, "upper_bound": at + 1.0},
                "point_estimate": at,
                "standard_error": 0.5,
            })
        };
        let (group, parameter) = name.rsplit_once('/').unwrap();
        let benchmark = folder.join(group.replace('/', "_")).join(parameter);
        for (run, median_ns) in [("base", 1.0), (LATEST, median_ns)] {
            let run = benchmark.join(run);
            fs::create_dir_all(&run).unwrap();
            let id = serde_json::json!({"group_id": group, "value_str": parameter, "full_id": name});
            let estimates =
                serde_json::json!({"mean": estimate(3.0), "median": estimate(median_ns), "slope": null});
            fs::write(run.join("benchmark.json"), id.to_string()).unwrap();
            fs::write(run.join("estimates.json"), estimates.to_string()).unwrap();
            fs::write(run.join("sample.json"), "{}").unwrap();
        }
    }

    fn args(folder: &Path, only: &[&str], write: bool) -> MicroArgs {
        MicroArgs {
            criterion: folder.join("criterion"),
            baseline: folder.join("micro.json"),
            only: only.iter().map(|name| (*name).to_owned()).collect(),
            tolerance: 25,
            write,
        }
    }

    #[test]
    fn medians_are_judged_by_the_tolerance() {
        use MicroVerdict::{Faster, Same, Slower};
        for (now, expected) in
            [(126.0, Slower), (124.0, Same), (100.0, Same), (81.0, Same), (79.0, Faster), (1_000.0, Slower)]
        {
            let verdicts = verdicts(&[("http/a/1", now)], &[("http/a/1", 100.0)]);
            assert_eq!(verdicts, [("http/a/1".to_owned(), expected)], "{now}");
        }
    }

    #[test]
    fn a_benchmark_of_one_side_alone_is_named() {
        use MicroVerdict::{Missing, New, Same};
        let verdicts = verdicts(&[("http/b", 1.0), ("http/c", 1.0)], &[("http/a", 1.0), ("http/b", 1.0)]);
        let expected = [("http/a", Missing), ("http/b", Same), ("http/c", New)];
        assert_eq!(verdicts, expected.map(|(name, verdict)| (name.to_owned(), verdict)));
    }

    #[test]
    fn failures_say_what_to_do() {
        let (measured, baseline) = (
            times(&[("http/new", 1.0), ("http/same", 1.0), ("http/slower", 150.0), ("http/faster", 50.0)]),
            times(&[("http/gone", 1.0), ("http/same", 1.0), ("http/slower", 100.0), ("http/faster", 100.0)]),
        );
        let rows = compare(&measured, &baseline, 25);
        let message = |name: &str| {
            let row = rows.iter().find(|row| row.name == name).unwrap();
            (row.is_failure(), row.message(Path::new("m.json")).unwrap_or_default())
        };
        let update = "bench micro --baseline m.json --only http --write";
        assert_eq!(message("http/same"), (false, String::new()));
        assert_eq!(message("http/new"), (true, format!("http/new: not in m.json; add it: {update}")));
        let faster = format!("http/faster: takes 50% less time than in m.json; update it: {update}");
        assert_eq!(message("http/faster"), (false, faster));
        for (name, start) in [
            ("http/slower", "http/slower: takes 50% more time than in m.json;"),
            ("http/gone", "http/gone: not measured;"),
        ] {
            let (is_failure, text) = message(name);
            assert!(is_failure && text.starts_with(start) && text.ends_with(update), "{text}");
            assert!(text.contains("cargo bench -p skysail-http"), "{text}");
        }
        let judged = not_judged(Path::new("m.json"), "another", "this");
        assert!(
            judged.starts_with("nothing is judged: m.json was measured on another CPU model (another;"),
            "{judged}"
        );
        assert!(judged.contains("bench micro --baseline FILE --only http --write."), "{judged}");
        let other = table(&rows, false);
        assert!(other.contains("|  1.50 | not judged |"), "{other}");
        let table = table(&rows, true);
        assert!(table.contains("| http/slower | 150.0 ns |   0.7 | 100.0 ns |  1.50 |  slower |"), "{table}");
        assert!(table.contains("| http/gone   |        - |     - |   1.0 ns |     - | missing |"), "{table}");
    }

    #[test]
    fn the_written_baseline_is_what_criterion_measured() {
        let folder = tempfile::tempdir().unwrap();
        let criterion = folder.path().join("criterion");
        assert!(run(args(folder.path(), &[], false)).is_err(), "there is no folder of Criterion");
        fs::create_dir_all(criterion.join("report")).unwrap();
        let error = run(args(folder.path(), &["yaml"], false)).unwrap_err().to_string();
        assert!(
            error.ends_with("no measurements of yaml; measure first: cargo bench -p skysail-yaml"),
            "{error}"
        );

        measure(&criterion, "http/parse/10", 200.04);
        let error = run(args(folder.path(), &[], false)).unwrap_err().to_string();
        assert!(error.contains("--write makes it"), "{error}");
        assert!(run(args(folder.path(), &[], true)).unwrap());
        let written = read(&folder.path().join("micro.json")).unwrap();
        let commit = commit(&folder.path().join("micro.json"));
        let time = MicroTime { commit, ..time(200.0) };
        assert_eq!(written.benchmarks, MicroTimes::from([("http/parse/10".to_owned(), time)]));
        assert!(run(args(folder.path(), &[], false)).unwrap(), "the same measurements");

        measure(&criterion, "http/parse/10", 300.0);
        assert!(!run(args(folder.path(), &[], false)).unwrap(), "slower");
        let written = MicroBaseline { cpu: "another".to_owned(), ..written };
        write(&folder.path().join("micro.json"), written, &[]).unwrap();
        assert!(run(args(folder.path(), &[], false)).unwrap(), "slower on another CPU");
        let error = run(args(folder.path(), &["http"], true)).unwrap_err().to_string();
        assert!(error.contains("measured on another CPU model (another; "), "{error}");
    }

    #[test]
    fn a_baseline_names_changes_of_the_tree() {
        let folder = tempfile::tempdir().unwrap();
        let git = |arguments: &[&str]| {
            let author = ["-c", "user.name=test", "-c", "user.email=test@example.org"];
            let output = std::process::Command::new("git")
                .arg("-C")
                .arg(folder.path())
                .args(author)
                .args(arguments)
                .output();
            assert!(output.unwrap().status.success(), "{arguments:?}");
        };
        let baseline = folder.path().join("bench/micro.json");
        fs::create_dir(folder.path().join("bench")).unwrap();
        assert_eq!(commit(&baseline), "unknown");
        for file in ["code.rs", "bench/micro.json"] {
            fs::write(folder.path().join(file), "1").unwrap();
        }
        git(&["init", "--quiet"]);
        git(&["add", "."]);
        git(&["commit", "--quiet", "-m", "first"]);
        let first = commit(&baseline);
        assert!(first.len() == 12 && first.bytes().all(|byte| byte.is_ascii_hexdigit()), "{first}");
        fs::write(&baseline, "2").unwrap();
        assert_eq!(commit(&baseline), first, "the baseline itself is no change");
        fs::write(folder.path().join("code.rs"), "2").unwrap();
        assert_eq!(commit(&baseline), format!("{first} with changes"));
    }

    #[test]
    fn other_crates_are_left_out_and_kept() {
        let folder = tempfile::tempdir().unwrap();
        let criterion = folder.path().join("criterion");
        let file = folder.path().join("micro.json");
        for name in ["http/a/1", "httpx/a/1", "yaml/a/1", "yaml/b/1"] {
            measure(&criterion, name, 100.0);
        }
        assert!(run(args(folder.path(), &[], true)).unwrap());
        fs::remove_dir_all(&criterion).unwrap();
        measure(&criterion, "http/a/1", 100.0);
        measure(&criterion, "yaml/b/1", 300.0);
        assert!(!run(args(folder.path(), &[], false)).unwrap(), "two are missing");
        assert!(run(args(folder.path(), &["http"], false)).unwrap());
        assert!(run(args(folder.path(), &["yaml", "yaml"], true)).unwrap());
        let now = read(&file).unwrap().benchmarks;
        let medians: Vec<_> = now.iter().map(|(name, time)| (name.as_str(), time.median_ns)).collect();
        assert_eq!(medians, [("http/a/1", 100.0), ("httpx/a/1", 100.0), ("yaml/b/1", 300.0)]);
    }

    #[test]
    fn a_file_of_another_program_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("micro.json");
        for (text, reason) in [
            ("[]", "is no baseline of bench micro"),
            (r#"{"format": 2, "cpu": "", "benchmarks": {}}"#, "its format is 2, not 1"),
        ] {
            fs::write(&file, text).unwrap();
            let error = read(&file).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn durations_have_a_suitable_unit() {
        assert_eq!(
            [0.25, 999.9, 1_000.0, 1_234_567.0].map(duration),
            ["0.2 ns", "999.9 ns", "1.00 µs", "1.23 ms"]
        );
    }
}
