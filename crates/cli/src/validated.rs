//! Output of `skysail up` for files without workloads, which are checked and not run.

use serde_json::json;
use skysail_core::{logging::printable, stdio};
use skysail_sandbox::CheckResult;

use crate::{diagnostics::Diagnostic, exit, view::Output};

/// Prints the diagnostics and the number of objects. The exit code tells whether there are errors.
pub(crate) fn report(mesh: &str, checked: &CheckResult, output: Output) -> anyhow::Result<u8> {
    let findings: Vec<Diagnostic> = checked.findings.iter().cloned().map(Diagnostic::from).collect();
    let summary = format!(
        "{}. There is no workload to run: add a Deployment or a Pod, or pass the folder that has them",
        checked.summary()
    );
    match output {
        Output::Text => {
            for Diagnostic { severity, text } in &findings {
                stdio::print(printable(format_args!("{severity}: {text}")))?;
            }
            stdio::print(printable(summary))?;
        }
        Output::Json => {
            let errors = findings.iter().filter(|finding| finding.is_error());
            let result = json!({
                "mesh": mesh,
                "healthy": checked.is_good(),
                "problems": errors.map(|error| format!("error: {}", error.text)).collect::<Vec<_>>(),
                "seconds": 0.0,
                "seconds_to_ready": null,
                "pods": [],
                "diagnostics": findings,
                "edges": [],
            });
            stdio::print_error(printable(summary));
            stdio::print(serde_json::to_string_pretty(&result)?)?;
        }
    }
    Ok(exit::of(checked.is_good()))
}
