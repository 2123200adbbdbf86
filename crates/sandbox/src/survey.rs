//! The user's files, examined before the start: whether there are workloads, and whether the names on the command line
//! exist.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::Ipv4Addr,
    path::PathBuf,
};

use skysail_model::{Kind, Severity};

use crate::{
    capacity::Capacity,
    check::{self, CheckResult},
    error::Error,
    files::{FileUpdate, Files},
    objects::{Objects, Workload, repository},
    plan::Pod,
};

/// Workloads of the files.
#[derive(Clone, Debug)]
pub struct Survey {
    /// Whether the pods of a workload get a sidecar, by `NAMESPACE/NAME`.
    workloads: BTreeMap<String, bool>,
    /// Images of all containers.
    images: BTreeSet<String>,
    /// Number of pods, and the workload with the most.
    pods: usize,
    largest: String,
    objects: Objects,
    /// Result of the check if there are no workloads.
    pub checked: Option<CheckResult>,
}

/// Name of standard input in sentences.
const STDIN: &str = "standard input";
/// Kinds that create pods.
const WORKLOADS: [Kind; 6] =
    [Kind::Deployment, Kind::StatefulSet, Kind::DaemonSet, Kind::ReplicaSet, Kind::Job, Kind::Pod];

impl Survey {
    /// Reads these folders and files, and a text from standard input as the last one. If no object is a workload, for
    /// example if all are routing rules, the objects are checked instead.
    ///
    /// # Errors
    /// When the files cannot be read, or hold no object or no workload that can be run.
    pub fn read(config: &[PathBuf], stdin: Option<&str>) -> Result<Self, Error> {
        let mut shown: Vec<_> = config.iter().map(|path| path.display().to_string()).collect();
        shown.extend(stdin.map(|_| STDIN.to_owned()));
        let shown = shown.join(", ");
        let changes = check::changes(config, stdin, &shown)?;
        let mut files = Files::default();
        for change in &changes {
            files.take(FileUpdate::of(change.clone()));
        }
        let objects = files.objects();
        let kinds = files.kinds();
        if !kinds.is_empty() && !WORKLOADS.iter().any(|kind| kinds.contains_key(&kind.to_string())) {
            let checked = Some(CheckResult::read(changes, kinds, &objects));
            return Ok(Self { checked, ..Self::of(&objects) });
        }
        if objects.workloads.values().all(|workload| workload.replicas == 0) {
            return Err(Error::Refused(nothing_to_run(&shown, &files, &objects)));
        }
        Ok(Self::of(&objects))
    }

    fn of(objects: &Objects) -> Self {
        let (mut workloads, mut images) = (BTreeMap::new(), BTreeSet::new());
        for workload in objects.workloads.values() {
            let pod = Pod::new(workload, String::new(), Ipv4Addr::UNSPECIFIED, &objects.namespaces);
            *workloads.entry(format!("{}/{}", workload.namespace, workload.name)).or_default() |= pod.sidecar;
            images.extend(pod.containers().map(|container| container.image.clone()));
        }
        let replicas = |workload: &&Workload| workload.replicas;
        let pods = objects.workloads.values().map(|workload| workload.replicas as usize).sum();
        let largest = objects.workloads.values().max_by_key(replicas).map_or_else(String::new, |workload| {
            let Workload { kind, namespace, name, replicas, .. } = workload;
            format!("{kind} {namespace}/{name} with {replicas}")
        });
        Self { workloads, images, pods, largest, checked: None, objects: objects.clone() }
    }

    pub(crate) fn objects(&self) -> &Objects {
        &self.objects
    }

    /// Checks that the machine can run all pods.
    ///
    /// # Errors
    /// When it cannot.
    pub fn check_capacity(&self, capacity: &Capacity) -> Result<(), Error> {
        if self.pods <= capacity.pods {
            return Ok(());
        }
        Err(Error::Refused(format!(
            "the configuration has {} pods (most: {}), and the limit is {capacity}; lower `replicas` or raise --max-pods",
            self.pods, self.largest
        )))
    }

    /// Checks that an Envoy can replace this workload's sidecar, which `--envoy` requests.
    ///
    /// # Errors
    /// When there is no such workload, or it has no sidecar.
    pub fn check_envoy(&self, workload: &str) -> Result<(), Error> {
        match self.workloads.get(workload) {
            Some(true) => Ok(()),
            Some(false) => Err(Error::Refused(format!(
                "--envoy {workload}: its pods have no sidecar to replace; sidecar.istio.io/inject, istio-injection and \
                 hostNetwork decide whether they get one"
            ))),
            None => Err(Error::Refused(format!(
                "--envoy {workload}: no such workload; the workloads are {}",
                list(self.workloads.keys())
            ))),
        }
    }

    /// Checks that a container has the image that `--image` names, with or without its tag.
    ///
    /// # Errors
    /// When no container has it.
    pub fn check_image(&self, image: &str) -> Result<(), Error> {
        if self.images.iter().any(|used| used == image || repository(used) == image) {
            return Ok(());
        }
        let images = list(&self.images);
        Err(Error::Refused(format!("--image {image}: no container has this image; the images are {images}")))
    }
}

/// Returns the error text for files without a runnable workload.
fn nothing_to_run(paths: &str, files: &Files, objects: &Objects) -> String {
    let kinds = files.kinds();
    let found = if files.len() == 0 {
        "no *.yaml, *.yml or *.json file".to_owned()
    } else {
        let count =
            |number: usize, what: &str| format!("{number} {what}{}", if number == 1 { "" } else { "s" });
        let objects = list(kinds.iter().map(|(kind, number)| format!("{number} {kind}")));
        let objects = if kinds.is_empty() { "no object".to_owned() } else { objects };
        format!("{} with {objects}", count(files.len(), "file"))
    };
    let wanted = if objects.workloads.is_empty() {
        "add a Deployment, StatefulSet, DaemonSet, ReplicaSet, Job or Pod"
    } else {
        "every workload has `replicas: 0`"
    };
    let errors = files.diagnostics().filter(|found| found.severity == Severity::Error);
    let reasons = errors.map(|error| error.to_string()).chain(files.notes().map(ToString::to_string));
    let notes: String = reasons.map(|reason| format!("\n{reason}")).collect();
    format!("no workloads in {paths}: {found}; {wanted}{notes}")
}

pub(crate) fn list<T: ToString>(items: impl IntoIterator<Item = T>) -> String {
    let items: Vec<_> = items.into_iter().map(|item| item.to_string()).collect();
    if items.is_empty() { "none".to_owned() } else { items.join(", ") }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use skysail_model::Diagnostic;

    use super::*;

    fn survey(text: &str) -> Result<Survey, String> {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a.yaml"), text).unwrap();
        Survey::read(&[folder.path().to_owned()], None).map_err(|error| error.to_string())
    }

    const DEPLOYMENT: &str = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web, namespace: shop}\nspec:\n  \
                              replicas: 1\n  selector: {matchLabels: {app: web}}\n  template:\n    metadata: {labels: {app: web}}\n    \
                              spec: {containers: [{name: web, image: acme/shop:2}]}\n";

    #[test]
    fn names_on_the_command_line_must_exist() {
        let survey = survey(DEPLOYMENT).unwrap();
        survey.check_envoy("shop/web").unwrap();
        survey.check_image("acme/shop").unwrap();
        survey.check_image("acme/shop:2").unwrap();
        let error = survey.check_envoy("shop/wbe").unwrap_err().to_string();
        assert_eq!(error, "--envoy shop/wbe: no such workload; the workloads are shop/web");
        let error = survey.check_image("acme/shop:1").unwrap_err().to_string();
        assert_eq!(error, "--image acme/shop:1: no container has this image; the images are acme/shop:2");
    }

    #[test]
    fn more_pods_than_the_limit_are_refused_with_the_reason() {
        let survey = survey(&DEPLOYMENT.replace("replicas: 1", "replicas: 2000")).unwrap();
        let error = survey.check_capacity(&Capacity::of_machine(Some(500), false)).unwrap_err().to_string();
        let expected = "the configuration has 2000 pods (most: Deployment shop/web with 2000), and the limit is \
                        500 pods (--max-pods); lower `replicas` or raise --max-pods";
        assert_eq!(error, expected);
    }

    #[test]
    fn a_workload_without_a_sidecar_takes_no_envoy() {
        let text =
            DEPLOYMENT.replace("labels: {app: web}", "labels: {app: web, sidecar.istio.io/inject: 'false'}");
        let error = survey(&text).unwrap().check_envoy("shop/web").unwrap_err().to_string();
        assert!(error.contains("no sidecar"), "{error}");
    }

    #[test]
    fn rules_without_workloads_are_checked_as_by_the_control_plane() {
        let rule = |subset: &str| {
            format!(
                "apiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {{name: web, namespace: shop}}\nspec:\n  \
                 hosts: [web]\n  http: [{{route: [{{destination: {{host: web, subset: {subset}}}}}]}}]\n---\n\
                 apiVersion: networking.istio.io/v1\nkind: DestinationRule\nmetadata: {{name: web, namespace: shop}}\nspec:\n  \
                 host: web\n  subsets: [{{name: v1, labels: {{version: v1}}}}]\n---\n\
                 apiVersion: v1\nkind: Service\nmetadata: {{name: web, namespace: shop}}\nspec:\n  ports: [{{name: http, port: 80}}, {{name: tcp, port: 9000}}]\n"
            )
        };
        let checked = |text: &str| survey(text).unwrap().checked.unwrap();
        let good = checked(&rule("v1"));
        assert!(good.is_good(), "{:?}", good.findings);
        assert_eq!(good.summary(), "1 DestinationRule, 1 Service, 1 VirtualService checked: no errors");
        // An error across objects, and one in a single object.
        let missing = checked(&rule("v2"));
        let found = |finding: &Diagnostic| finding.line == 6 && finding.to_string().contains("v2");
        assert!(missing.findings.iter().any(found), "{:?}", missing.findings);
        let refused = checked(&rule("v1").replace("hosts: [web]", "hosts: web"));
        assert!(!refused.is_good());
        assert!(refused.summary().contains("checked: 1 error"), "{}", refused.summary());
        assert!(survey(DEPLOYMENT).unwrap().checked.is_none());
    }

    #[test]
    fn missing_workloads_are_reported_with_the_objects_found() {
        for (text, found) in [
            ("", "1 file with no object; add a Deployment"),
            (
                &DEPLOYMENT.replace("replicas: 1", "replicas: 0"),
                "1 file with 1 Deployment; every workload has `replicas: 0`",
            ),
            (&DEPLOYMENT.replace("replicas: 1", "replicas: x"), "spec.replicas"),
        ] {
            let error = survey(text).unwrap_err();
            assert!(error.contains(found), "{error}");
        }
        let empty = tempfile::tempdir().unwrap();
        let error = Survey::read(&[empty.path().to_owned()], None).unwrap_err().to_string();
        let expected = "no *.yaml, *.yml or *.json file; add a Deployment, StatefulSet, DaemonSet, ReplicaSet, Job or Pod";
        assert!(error.ends_with(expected), "{error}");
    }
}
