//! Takes the turns of a scenario of another benchmark, each in a process of its own.

use std::{collections::BTreeMap, ffi::OsStr, fs, path::PathBuf, process::Stdio};

use anyhow::{Context as _, bail};
use serde_json::Value;
use tokio::process::Command;

use super::{
    CommandScenario,
    format::{CommandCase, CommandMeasurement},
    search::with_sidecars,
};
use crate::{
    peers::Peer,
    percentiles,
    report::Machine,
    scenario::{
        cases::{self, CaseResult, CaseSettings},
        format::SizeName,
    },
};

/// Takes all turns. A signal ends them early. `peers` has the program to measure, and Envoy's if it takes part.
///
/// # Errors
/// This program's file cannot be found.
pub(in crate::scenario) fn run(
    scenario: CommandScenario,
    size: SizeName,
    rounds: Option<u32>,
    peers: &[(Peer, PathBuf)],
    machine: Machine,
) -> anyhow::Result<CaseResult<CommandScenario>> {
    let of_size = scenario.sizes.of(size);
    let settings = CaseSettings {
        cases: scenario.cases(size),
        rounds: rounds.unwrap_or(of_size.rounds),
        seconds: 0.0,
        warmup: 0.0,
    };
    let (driver, benchmark) = (std::env::current_exe()?, scenario.benchmark());
    let program = |peer: Peer| peers.iter().find(|(of, _)| *of == peer).map(|(_, program)| program);
    let mut programs: Vec<&OsStr> = Vec::new();
    if let Some(skysail) = program(Peer::Skysail) {
        programs.extend([OsStr::new("--skysail"), skysail.as_os_str()]);
    }
    match program(Peer::Envoy) {
        Some(envoy) => programs.extend([OsStr::new("--envoy"), envoy.as_os_str()]),
        None if scenario.has_envoy() => programs.push(OsStr::new("--no-envoy")),
        None => {}
    }
    let run = async |arguments: &str| {
        let mut command = Command::new(&driver);
        command.args(["bench", benchmark]).args(arguments.split_whitespace());
        measure(command.args(&programs)).await
    };
    cases::run(scenario, size, settings, (machine, peers), async |case, _, _| {
        let CommandCase { arguments, search, .. } = case;
        match search {
            None => run(arguments).await,
            Some(search) => search.run(async |number| run(&with_sidecars(arguments, number)).await).await,
        }
    })
}

/// Runs the benchmark and reads its result.
async fn measure(command: &mut Command) -> anyhow::Result<CommandMeasurement> {
    let folder =
        tempfile::Builder::new().prefix("skysail-bench-").tempdir().context("cannot make a folder")?;
    let file = folder.path().join("result.json");
    let output = command
        .args(["--output", "json", "--result"])
        .arg(&file)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        // Ctrl-C on the terminal reaches only this process, which then ends that one.
        .process_group(0)
        .kill_on_drop(true)
        .output()
        .await?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        bail!("{}: {}", output.status, errors.lines().last().unwrap_or("no message"));
    }
    let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    let result: Value = serde_json::from_str(&text)?;
    Ok(CommandMeasurement {
        sidecars: result["settings"]["sidecars"].as_u64().context("the result has no number of sidecars")?,
        figures: figures(&result),
        searched: Vec::new(),
    })
}

/// Returns the figures of a result of `bench control` or `bench dns`.
pub(super) fn figures(result: &Value) -> BTreeMap<String, f64> {
    let mut figures = BTreeMap::new();
    let mut add = |name: &str, value: Option<f64>| {
        value.map(|value| figures.insert(name.to_owned(), value));
    };
    for (name, pointer) in [
        ("idle_mb", "/idle_mb"),
        ("left_mb", "/left_mb"),
        ("resident_mb", "/connect/resident_mb"),
        ("peak_mb", "/connect/peak_mb"),
        ("connect_seconds", "/connect/seconds"),
        ("connect_p99_ms", "/connect/ms/p99"),
        ("connect_cpu_ms", "/connect/cpu_ms_each"),
        ("churn_cpu_ms", "/churn/cpu_ms_each"),
        ("queries_skysail_per_second", "/skysail/per_second"),
        ("queries_envoys_per_second", "/envoys_per_second"),
    ] {
        add(name, result.pointer(pointer).and_then(Value::as_f64));
    }
    let of_churn = |field: &str| result.pointer(&format!("/churn/{field}")).and_then(Value::as_f64);
    let churn = of_churn("per_second");
    let reconnected = churn.zip(of_churn("seconds")).map(|(rate, seconds)| (rate * seconds).round() as u64);
    let is_supported = reconnected.is_some_and(|number| percentiles::is_supported("churn_p99_ms", number));
    add("churn_p99_ms", of_churn("ms/p99").filter(|_| is_supported));
    add("churn_interval_ms", churn.filter(|rate| *rate > 0.0).map(|rate| 1e3 / rate));
    for change in result["changes"].as_array().into_iter().flatten() {
        let Some(name) = change["change"].as_str() else { continue };
        for figure in ["last_ms", "cpu_ms"] {
            add(&format!("{name}_{figure}"), change[figure].as_f64());
        }
    }
    figures
}
