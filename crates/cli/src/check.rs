//! `skysail check`: looks for problems of a control plane and its sidecars in a Kubernetes cluster.

use std::{
    cell::{Cell, RefCell},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use skysail_core::{
    logging::printable,
    stdio::{self, PrintError},
};
use skysail_install::{Category, CheckResult, Connection, Target, Verdict, check_before, check_installed};

use crate::{
    exit,
    install::{TargetArgs, runtime},
    view::Output,
};

/// Pause between two rounds of `--wait`.
const PAUSE: Duration = Duration::from_secs(2);

/// Arguments of `skysail check`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
The command changes nothing: the API server only tries to create a pod (dry run). A check for which you lack a \
permission is skipped.

Examples:
  skysail check --before                # may Skysail be installed here?
  skysail install && skysail check
  skysail check --wait 2m --output json")]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    place: TargetArgs,
    /// Check whether a control plane can be installed.
    #[arg(long)]
    before: bool,
    /// Repeat the checks until none fails, at most for this time.
    #[arg(long, value_name = "TIME", value_parser = crate::up::duration)]
    wait: Option<Duration>,
    /// Format of the results.
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    output: Output,
}

/// Makes the checks and prints their results.
pub(crate) fn run(args: &CheckArgs) -> anyhow::Result<u8> {
    let target = args.place.target()?;
    let is_streamed = args.wait.is_none() && args.output == Output::Text;
    let end = Instant::now() + args.wait.unwrap_or_default();
    let (results, is_good) = runtime()?.block_on(async {
        let connection = args.place.connect().await?;
        loop {
            let (results, is_good) = checks(args, &connection, &target, is_streamed).await?;
            if is_good || Instant::now() + PAUSE > end {
                return anyhow::Ok((results, is_good));
            }
            tokio::time::sleep(PAUSE).await;
        }
    })?;
    match args.output {
        Output::Json => {
            let checks: Vec<Value> = results.iter().map(value).collect();
            let all = json!({ "healthy": is_good, "checks": checks });
            stdio::print(serde_json::to_string_pretty(&all)?)?;
        }
        Output::Text => {
            if !is_streamed {
                let mut category = None;
                results.iter().try_for_each(|result| print(result, category.replace(result.category)))?;
            }
            stdio::print(summary(&results))?;
        }
    }
    Ok(exit::of(is_good))
}

/// Makes the checks once. Returns their results, and whether none failed.
async fn checks(
    args: &CheckArgs,
    connection: &Connection,
    target: &Target,
    is_streamed: bool,
) -> Result<(Vec<CheckResult>, bool), PrintError> {
    let (results, failure) = (RefCell::new(Vec::<CheckResult>::new()), Cell::new(None));
    let report = |result: &CheckResult| {
        let before = results.borrow().last().map(|last| last.category);
        if is_streamed && let Err(error) = print(result, before) {
            failure.set(Some(error));
        }
        results.borrow_mut().push(result.clone());
    };
    let is_good = match args.before {
        true => check_before(connection, target, &report).await,
        false => check_installed(connection, target, &report).await,
    };
    match failure.take() {
        Some(error) => Err(error),
        None => Ok((results.into_inner(), is_good)),
    }
}

/// Prints a result, after the name of its category if that is another than before.
fn print(result: &CheckResult, before: Option<Category>) -> Result<(), PrintError> {
    if before != Some(result.category) {
        stdio::print(result.category.as_str())?;
    }
    let detail = if result.detail.is_empty() { String::new() } else { format!(": {}", result.detail) };
    stdio::print(printable(format_args!("  {:<7}  {}{detail}", result.verdict, result.subject)))?;
    if !result.remedy.is_empty() {
        stdio::print(printable(format_args!("           → {}", result.remedy)))?;
    }
    Ok(())
}

fn value(result: &CheckResult) -> Value {
    let CheckResult { category, subject, verdict, detail, remedy } = result;
    json!({ "category": category.as_str(), "subject": subject, "verdict": verdict.as_str(), "detail": detail,
            "remedy": remedy })
}

fn summary(results: &[CheckResult]) -> String {
    let all = [Verdict::Passed, Verdict::Warned, Verdict::Failed, Verdict::Skipped];
    let count = |verdict| results.iter().filter(|result| result.verdict == verdict).count();
    let counts = all.map(|verdict| format!("{verdict}: {}", count(verdict)));
    counts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_counted_by_verdict() {
        let result = |verdict| CheckResult {
            category: Category::Cluster,
            subject: "a",
            verdict,
            detail: "b".into(),
            remedy: String::new(),
        };
        let results = [Verdict::Passed, Verdict::Failed, Verdict::Passed].map(result);
        assert_eq!(summary(&results), "passed: 2, warning: 0, failed: 1, skipped: 0");
        assert_eq!(value(&results[1])["verdict"], "failed");
    }
}
