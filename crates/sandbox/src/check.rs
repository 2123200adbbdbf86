//! Check of configuration files without running them: the diagnostics of the control plane, and with
//! [`CheckResult::analyze`] those that `skysail analyze` adds.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::Ipv4Addr,
    path::PathBuf,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use skysail_model::{
    Change, Code, Diagnostic, Files as ModelFiles, Object, Origin, Parsed, Severity, World, manifests, parse,
    parse_with_lines,
};
use skysail_source::{FileChange, FileState, Folders};

use crate::{
    error::{Context as _, Error},
    files::{FileUpdate, Files},
    objects::{Key, Objects},
    plan::VirtualAddresses,
};

/// Name of standard input in diagnostics.
pub(crate) const STDIN: &str = "-";

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
        let mut addresses = VirtualAddresses::default();
        let (world, mut findings) = mesh_world(changes, addresses.assign(&objects.services), parse);
        findings.extend(world.validate());
        Self { findings: findings.into_iter().collect(), kinds }
    }

    /// Analyzes folders and files, and a text from standard input as the last one. A certificate is compared with the
    /// time `now`.
    ///
    /// # Errors
    /// When a folder or file does not exist or cannot be read, or there is no configuration file.
    pub fn analyze(config: &[PathBuf], stdin: Option<&str>, now: SystemTime) -> Result<Self, Error> {
        let shown = config.iter().map(|path| path.display().to_string());
        let shown: Vec<String> = shown.chain(stdin.map(|_| "standard input".to_owned())).collect();
        let shown = shown.join(", ");
        let changes = changes(config, stdin, &shown)?;
        let mut files = Files::default();
        for change in &changes {
            files.take(FileUpdate::of(change.clone()));
        }
        let (kinds, objects) = (files.kinds(), files.objects());
        drop(files);
        if changes.is_empty() {
            let message = format!("nothing to analyze in {shown}: there is no *.yaml, *.yml or *.json file");
            return Err(Error::Refused(message));
        }
        let mut addresses = VirtualAddresses::default();
        let (mut world, findings) =
            mesh_world(changes, addresses.assign(&objects.services), parse_with_lines);
        let seconds = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let findings = world.analyze(findings, i64::try_from(seconds).unwrap_or(i64::MAX));
        Ok(Self { findings, kinds })
    }

    /// Returns whether there is no error.
    pub fn is_good(&self) -> bool {
        self.count(Severity::Error) == 0
    }

    /// Returns the number of objects by kind.
    pub fn kinds(&self) -> &BTreeMap<String, usize> {
        &self.kinds
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

    /// Returns the number of diagnostics with a severity.
    pub fn count(&self, severity: Severity) -> usize {
        self.findings.iter().filter(|finding| finding.severity == severity).count()
    }
}

/// Reads folders and files, and a text from standard input as the last layer.
pub(crate) fn changes(
    config: &[PathBuf],
    stdin: Option<&str>,
    shown: &str,
) -> Result<Vec<FileChange>, Error> {
    let mut changes = Folders::new(config).context(format!("reading {shown}"))?.scan();
    changes.extend(stdin.map(|text| {
        let state = FileState::Text(text.to_owned());
        FileChange { layer: config.len(), path: STDIN.to_owned(), state }
    }));
    Ok(changes)
}

/// Reads files as the control plane does. Services get these addresses. Also returns the diagnostics of the files.
pub(crate) fn mesh_world(
    changes: Vec<FileChange>,
    addresses: &BTreeMap<Key, Ipv4Addr>,
    parse: fn(&str, &str) -> Parsed,
) -> (World, BTreeSet<Diagnostic>) {
    let (mut files, mut world) = (ModelFiles::new(), World::new());
    let mut findings = BTreeSet::new();
    for change in changes {
        match change.state {
            FileState::Text(text) => {
                for mut change in files.take(change.layer, &change.path, parse(&text, &change.path)) {
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
            FileState::Deleted => {}
        }
    }
    findings.extend(files.diagnostics());
    (world, findings)
}

/// Adds an object that the mesh makes, with the origin of the object that it is made from.
pub(crate) fn apply(world: &mut World, object: &serde_json::Value, origin: &Origin) {
    for manifest in manifests(&object.to_string(), &origin.file).objects {
        world.apply(manifest.object, origin.clone());
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
