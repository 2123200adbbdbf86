//! Check of files without workloads, such as routing rules: the diagnostics of the control plane, without running one.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use skysail_model::{Change, Code, Diagnostic, Files as ModelFiles, Object, Severity, World};
use skysail_source::{FileChange, FileState};

use crate::{objects::Objects, plan::VirtualAddresses};

/// Result of a check.
#[derive(Clone, Debug)]
pub struct CheckResult {
    /// Diagnostics in the order of files and lines.
    pub findings: Vec<Diagnostic>,
    /// Number of objects by kind.
    kinds: BTreeMap<String, usize>,
}

impl CheckResult {
    /// Reads the files as the control plane does. Services get the addresses that a mesh would allocate.
    pub(crate) fn read(changes: Vec<FileChange>, kinds: BTreeMap<String, usize>, objects: &Objects) -> Self {
        let (mut files, mut world) = (ModelFiles::new(), World::new());
        let mut addresses = VirtualAddresses::default();
        let addresses = addresses.assign(&objects.services);
        let mut findings = BTreeSet::new();
        for change in changes {
            match change.state {
                FileState::Text(text) => {
                    for mut change in files.set(change.layer, &change.path, &text) {
                        if let Change::Apply(Object::Service(service), _) = &mut change
                            && let key = (service.meta.namespace.clone(), service.meta.name.clone())
                            && let Some(address) = addresses.get(&key)
                        {
                            Arc::make_mut(service).spec.cluster_ips = vec![(*address).into()];
                        }
                        change.apply_to(&mut world);
                    }
                }
                FileState::Unreadable(reason) => {
                    let message = format!("cannot be read: {reason}");
                    findings.insert(Diagnostic::new(Code::Unreadable, &change.path, 0, message));
                }
                FileState::Gone => {}
            }
        }
        findings.extend(files.diagnostics());
        findings.extend(world.validate());
        Self { findings: findings.into_iter().collect(), kinds }
    }

    /// Returns whether there is no error.
    pub fn is_good(&self) -> bool {
        self.count(Severity::Error) == 0
    }

    /// Returns a line with the number of objects by kind and the result.
    pub fn summary(&self) -> String {
        let kinds: Vec<_> = self.kinds.iter().map(|(kind, number)| count(*number, kind)).collect();
        let mut result = match self.count(Severity::Error) {
            0 => "no errors".to_owned(),
            errors => count(errors, "error"),
        };
        if let warnings @ 1.. = self.count(Severity::Warning) {
            result = format!("{result}, {}", count(warnings, "warning"));
        }
        format!("{} checked: {result}", kinds.join(", "))
    }

    fn count(&self, severity: Severity) -> usize {
        self.findings.iter().filter(|finding| finding.severity == severity).count()
    }
}

/// Returns a number and a noun, in the plural if needed.
fn count(number: usize, what: &str) -> String {
    match what.strip_suffix('y') {
        _ if number == 1 => format!("1 {what}"),
        Some(stem) if !stem.ends_with(['a', 'e', 'o']) => format!("{number} {stem}ies"),
        _ if what.ends_with('s') => format!("{number} {what}es"),
        _ => format!("{number} {what}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_have_their_plural() {
        let counted =
            [(1, "Service"), (2, "Service"), (2, "AuthorizationPolicy"), (3, "Ingress"), (2, "Gateway")]
                .map(|(number, what)| count(number, what));
        assert_eq!(
            counted,
            ["1 Service", "2 Services", "2 AuthorizationPolicies", "3 Ingresses", "2 Gateways"]
        );
    }
}
