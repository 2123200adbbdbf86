//! Findings about the configuration: errors and warnings for the log and the admin pages.

use std::collections::BTreeSet;

use skysail_model::{Code, Diagnostic, Severity, Validator, World};
use tracing::{error, info, warn};

use super::{
    Publisher,
    change_log::{AppliedChange, ChangeDescription, ChangeLog, describe},
    compiler::{PanicReport, catch_panic},
    state::State,
    status::lock,
};

impl Publisher {
    /// Validates the World, and describes the changes that led to it unless they are those of the start.
    pub(super) fn validate(
        &self,
        applied: Vec<AppliedChange>,
        before: &World,
        is_start: bool,
    ) -> Vec<ChangeDescription> {
        let world = self.read().world.clone();
        let validated = catch_panic(
            || "validating the configuration".to_owned(),
            || {
                let findings = lock(&self.validator).validate(&world);
                let applied = if is_start { Vec::new() } else { applied };
                let descriptions = describe(applied, before, &world, &findings);
                (findings, descriptions)
            },
        );
        drop(world);
        match validated {
            Ok((findings, descriptions)) => {
                self.write().findings = findings;
                descriptions
            }
            Err(panic) => {
                *lock(&self.validator) = Validator::default();
                self.report_panic(&PanicReport { text: panic.to_string(), is_new: true });
                Vec::new()
            }
        }
    }

    /// Returns the current findings.
    pub(crate) fn findings(&self) -> Vec<Diagnostic> {
        self.read().all_findings().into_iter().collect()
    }

    /// Returns the last published changes of the configuration.
    pub(crate) fn changes(&self) -> ChangeLog {
        self.read().change_log.clone()
    }
}

impl State {
    pub(super) fn all_findings(&self) -> BTreeSet<Diagnostic> {
        let unreadable = self.unreadable.iter().map(|(path, reason)| {
            Diagnostic::new(Code::Unreadable, path, 0, format!("cannot be read: {reason}"))
                .remedy("the last content of the file stays in effect until the file can be read")
        });
        let of_views = self.views.values().flat_map(|view| &view.findings).cloned();
        self.files
            .diagnostics()
            .into_iter()
            .chain(self.findings.iter().cloned())
            .chain(unreadable)
            .chain(of_views)
            .collect()
    }

    /// Logs the findings that were not there at the last call.
    pub(super) fn log_findings(&mut self) {
        let findings = self.all_findings();
        findings.difference(&self.logged_findings).for_each(log_finding);
        self.logged_findings = findings;
    }

    /// Logs the findings of a new view that were not logged before.
    pub(super) fn log_view_findings(&mut self, findings: &[Diagnostic]) {
        for finding in findings {
            if self.logged_findings.insert(finding.clone()) {
                log_finding(finding);
            }
        }
    }
}

fn log_finding(finding: &Diagnostic) {
    match finding.severity {
        Severity::Error => error!("{finding}"),
        Severity::Warning => warn!("{finding}"),
        Severity::Info => info!("{finding}"),
    }
}
