//! Configuration files and the objects in them that pods need.
//!
//! The control plane reads the same files by the same rules and reports their errors. An object that is refused keeps
//! its last valid version, here as there. All objects of an unreadable file stay as well.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use skysail_model::{Code, Diagnostic, Kind, Manifests, ObjectKey, Origin, manifests};
use skysail_source::{FileChange, FileState};

use crate::objects::{Item, Objects};

/// Time after which an empty or missing file counts as removed. Its pods stop then, and editors and copy tools remove a
/// file before they write it again.
const REMOVAL_DELAY: Duration = Duration::from_secs(1);

/// Content of the files.
#[derive(Debug, Default)]
pub(crate) struct Files {
    /// Files by layer and path.
    files: BTreeMap<FileKey, File>,
    /// Files that are empty or missing, and since when.
    missing: BTreeMap<FileKey, Instant>,
    /// Files that cannot be read, with the reason.
    unreadable: BTreeMap<FileKey, String>,
}

/// Layer and path of a file.
type FileKey = (usize, String);

/// Content of a file.
#[derive(Debug, Default)]
pub(crate) struct File {
    objects: BTreeMap<ObjectKey, (Item, Origin)>,
    manifests: Manifests,
    /// Diagnostics of objects that the model accepts and that cannot be run.
    notes: Vec<Diagnostic>,
}

/// A parsed change of a file.
#[derive(Debug)]
pub(crate) struct FileUpdate {
    file_key: FileKey,
    state: Result<Option<File>, String>,
}

impl FileUpdate {
    /// Parses a changed file. It takes seconds if the file is large.
    pub(crate) fn of(change: FileChange) -> Self {
        let FileChange { layer, path, state } = change;
        let state = match state {
            FileState::Text(text) => Ok(Some(File::read(&text, &path))),
            FileState::Deleted => Ok(None),
            FileState::Unreadable(reason) => Err(reason),
        };
        Self { file_key: (layer, path), state }
    }
}

impl File {
    fn read(text: &str, path: &str) -> Self {
        let mut file = Self { manifests: manifests(text, path), ..Self::default() };
        for manifest in std::mem::take(&mut file.manifests.objects) {
            let key = manifest.object.key();
            let (item, origin) = (Item::read(&manifest), manifest.origin);
            let note = |code, message: &str| Diagnostic::new(code, path, origin.line, message).object(&key);
            match item {
                Ok(Some(item)) => {
                    if let Some((_, before)) = file.objects.insert(key.clone(), (item, origin.clone())) {
                        file.manifests.diagnostics.extend(duplicate(&key, &before, &origin));
                    }
                }
                Ok(None) if key.kind == Kind::CronJob => {
                    let note = note(Code::NotRun, "is not run: `skysail up` has no schedules");
                    file.notes.push(note.remedy("run its template as a Job"));
                }
                Ok(None) => {}
                Err(problem) => {
                    file.notes.push(note(Code::CannotRun, &problem));
                    file.manifests.refused.insert(key);
                }
            }
        }
        file
    }

    fn is_empty(&self) -> bool {
        self.manifests.kinds.is_empty() && !self.manifests.unreadable
    }

    /// Takes over the previous version of refused objects.
    fn keep_refused(&mut self, before: Self) {
        for (key, item) in before.objects {
            if self.manifests.unreadable || self.manifests.refused.contains(&key) {
                self.objects.entry(key).or_insert(item);
            }
        }
    }
}

impl Files {
    /// Applies a change. Returns whether the objects may have changed.
    pub(crate) fn take(&mut self, update: FileUpdate) -> bool {
        let FileUpdate { file_key, state } = update;
        self.unreadable.remove(&file_key);
        match state {
            // Its previous objects stay.
            Err(reason) => {
                self.missing.remove(&file_key);
                self.unreadable.insert(file_key, reason);
                false
            }
            Ok(file) if file.as_ref().is_none_or(File::is_empty) && self.files.contains_key(&file_key) => {
                self.missing.entry(file_key).or_insert_with(Instant::now);
                false
            }
            Ok(None) => false,
            Ok(Some(mut file)) => {
                self.missing.remove(&file_key);
                if let Some(before) = self.files.remove(&file_key) {
                    file.keep_refused(before);
                }
                self.files.insert(file_key, file);
                true
            }
        }
    }

    /// Removes files that have been empty or missing for long enough. Returns whether there were any.
    pub(crate) fn remove_missing(&mut self) -> bool {
        let (removed, missing) = std::mem::take(&mut self.missing)
            .into_iter()
            .partition::<BTreeMap<_, _>, _>(|(_, since)| since.elapsed() >= REMOVAL_DELAY);
        self.missing = missing;
        removed.keys().for_each(|file_key| _ = self.files.remove(file_key));
        !removed.is_empty()
    }

    /// Returns whether files are about to be removed.
    pub(crate) fn has_missing(&self) -> bool {
        !self.missing.is_empty()
    }

    /// Returns the objects of all files; the last definition of a key is in effect.
    pub(crate) fn objects(&self) -> Objects {
        let mut objects = Objects::default();
        for (key, (item, _)) in self.files.values().flat_map(|file| &file.objects) {
            objects.add(key, item);
        }
        objects.complete();
        objects
    }

    /// Returns diagnostics of objects that cannot be run.
    pub(crate) fn notes(&self) -> impl Iterator<Item = &Diagnostic> {
        self.files.values().flat_map(|file| &file.notes)
    }

    /// Returns the diagnostics of the files. Duplicates are reported for objects that pods need.
    pub(crate) fn diagnostics(&self) -> impl Iterator<Item = Diagnostic> {
        let mut defined: BTreeMap<&ObjectKey, &Origin> = BTreeMap::new();
        let objects = self.files.values().flat_map(|file| &file.objects);
        let duplicates = objects.filter_map(move |(key, (_, origin))| {
            defined.insert(key, origin).and_then(|before| duplicate(key, before, origin))
        });
        let unreadable = self.unreadable.iter().map(|((_, path), reason)| {
            Diagnostic::new(Code::Unreadable, path, 0, format!("cannot be read: {reason}"))
        });
        let found = self.files.values().flat_map(|file| &file.manifests.diagnostics).cloned();
        unreadable.chain(found).chain(duplicates)
    }

    /// Returns the number of files.
    pub(crate) fn len(&self) -> usize {
        self.files.len()
    }

    /// Returns the number of objects by kind, of all kinds.
    pub(crate) fn kinds(&self) -> BTreeMap<String, usize> {
        let mut kinds = BTreeMap::new();
        for (kind, count) in self.files.values().flat_map(|file| &file.manifests.kinds) {
            *kinds.entry(kind.clone()).or_default() += count;
        }
        kinds
    }
}

/// Returns the warning about an object that is defined again; `None` if both definitions are the same.
fn duplicate(key: &ObjectKey, loser: &Origin, winner: &Origin) -> Option<Diagnostic> {
    let message = format!(
        "has no effect: {}:{} defines the object again, and the last definition counts",
        winner.file, winner.line
    );
    let diagnostic = Diagnostic::new(Code::DuplicateObject, &loser.file, loser.line, message).object(key);
    (loser.content != winner.content).then(|| diagnostic.remedy("remove one of them"))
}

#[cfg(test)]
mod tests {
    use skysail_model::api::kube::TargetPort;

    use super::*;

    const GOOD: &str = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: a, namespace: n}\nspec:\n  replicas: 2\n  selector: {matchLabels: {app: a}}\n  template:\n    metadata: {labels: {app: a}}\n    spec: {containers: [{name: a, image: x, ports: [{name: http, containerPort: 80}]}]}\n---\napiVersion: v1\nkind: Service\nmetadata: {name: a, namespace: n}\nspec: {selector: {app: a}, ports: [{port: 80, targetPort: http}]}\n";

    fn text(text: &str) -> FileUpdate {
        let state = FileState::Text(text.to_owned());
        FileUpdate::of(FileChange { layer: 0, path: "a.yaml".to_owned(), state })
    }

    fn removed() -> FileUpdate {
        FileUpdate::of(FileChange { layer: 0, path: "a.yaml".to_owned(), state: FileState::Deleted })
    }

    fn good() -> (Files, Objects) {
        let mut files = Files::default();
        assert!(files.take(text(GOOD)));
        let objects = files.objects();
        (files, objects)
    }

    #[test]
    fn entries_are_visible_where_the_mesh_configuration_says() {
        let mesh = |export: &str| {
            format!(
                "apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: istio, namespace: istio-system}}\ndata:\n  mesh: |\n    defaultServiceExportTo: {export}\n"
            )
        };
        let entry = |export: &str| {
            format!(
                "---\napiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {{name: e, namespace: n}}\nspec: {{hosts: [e.example], {export}resolution: STATIC, ports: [{{number: 80, name: http, protocol: HTTP}}], endpoints: [{{address: 10.0.0.1}}]}}\n"
            )
        };
        for (default, own, expected) in
            [("['.']", "", "."), ("['.']", "exportTo: ['*'], ", "*"), ("[other]", "", "other")]
        {
            let mut files = Files::default();
            assert!(files.take(text(&format!("{}{}", mesh(default), entry(own)))));
            let objects = files.objects();
            assert_eq!(objects.entries.values().next().unwrap().export_to, [expected]);
        }
    }

    #[test]
    fn a_broken_file_keeps_its_last_valid_objects() {
        let (mut files, objects) = good();
        let workload = &objects.workloads.values().next().unwrap();
        assert_eq!((workload.replicas, workload.template.metadata.labels.as_ref().unwrap().len()), (2, 1));
        let service = objects.services.values().next().unwrap();
        assert_eq!(service.spec.ports[0].target, TargetPort::Name("http".to_owned()));
        for broken in [
            &GOOD[..GOOD.len() - 5],
            &GOOD.replace("containers:", "containres:").replace("ports: [{port", "port: [{port"),
            &GOOD.replace("replicas: 2", "replicas: two").replace("apiVersion: v1", "apiVersion: v2"),
        ] {
            files.take(text(broken));
            assert_eq!(files.objects(), objects, "{broken}");
            assert!(files.diagnostics().next().is_some());
        }
        files.take(FileUpdate::of(FileChange {
            layer: 0,
            path: "a.yaml".to_owned(),
            state: FileState::Unreadable("a symbolic link whose target does not exist".to_owned()),
        }));
        assert_eq!(files.objects(), objects);
    }

    #[test]
    fn fields_that_are_null_are_absent() {
        let (_, objects) = good();
        let mut files = Files::default();
        let nulls = "volumes: null, initContainers: , containers: [{env: null, workingDir: ,name: a";
        files.take(text(&GOOD.replacen("containers: [{name: a", nulls, 1)));
        let spec = |objects: &Objects| objects.workloads.values().next().map(|one| one.template.spec.clone());
        assert_eq!(spec(&files.objects()), spec(&objects), "{:?}", files.notes().collect::<Vec<_>>());
    }

    #[test]
    fn a_file_that_is_empty_or_gone_for_a_moment_keeps_its_objects() {
        let (mut files, objects) = good();
        for moment in [text(""), removed()] {
            assert!(!files.take(moment));
            assert!(!files.remove_missing());
            assert_eq!(files.objects(), objects);
            files.take(text(&GOOD.replace("replicas: 2", "replicas: 3")));
            assert_eq!(files.objects().workloads.values().next().unwrap().replicas, 3);
            files.take(text(GOOD));
        }
        files.take(removed());
        while !files.remove_missing() {
            std::thread::yield_now();
        }
        assert_eq!(files.objects(), Objects::default());
    }

    #[test]
    fn an_object_that_is_defined_again_is_reported_if_it_differs() {
        let found = |texts: [&str; 2]| -> Vec<String> {
            let mut files = Files::default();
            for (layer, text) in texts.into_iter().enumerate() {
                let state = FileState::Text(text.to_owned());
                files.take(FileUpdate::of(FileChange { layer, path: format!("{layer}.yaml"), state }));
            }
            files.diagnostics().map(|found| found.to_string()).collect()
        };
        let other = GOOD.replace("replicas: 2", "replicas: 3");
        assert_eq!(found([GOOD, GOOD]), [""; 0]);
        let expected = "0.yaml:1: warning: Deployment n/a: has no effect: 1.yaml:1 defines the object again, and the last definition counts";
        assert!(
            matches!(&found([GOOD, &other])[..], [one] if one.contains(expected)),
            "{:?}",
            found([GOOD, &other])
        );
        assert_eq!(found(["", &format!("{GOOD}---\n{other}")]).len(), 1);
    }

    #[test]
    fn a_cron_job_is_named_as_not_run() {
        let mut files = Files::default();
        files.take(text("apiVersion: batch/v1\nkind: CronJob\nmetadata: {name: night, namespace: n}\nspec:\n  schedule: '0 0 * * *'\n  jobTemplate: {spec: {template: {spec: {restartPolicy: Never, containers: [{name: a, image: x}]}}}}\n"));
        let notes: Vec<String> = files.notes().map(ToString::to_string).collect();
        let expected = "a.yaml:1: warning: CronJob n/night: is not run: `skysail up` has no schedules; run its template as a Job [SKY0902]";
        assert_eq!(notes, [expected]);
    }

    #[test]
    fn names_that_lead_out_of_folders_are_refused() {
        for (good, bad) in [
            ("name: a, namespace", "name: ../../a, namespace"),
            ("namespace: n", "namespace: .."),
            ("namespace: n", "namespace: /tmp"),
            ("containers: [{name: a", "containers: [{name: a/../b"),
            ("containers: [{name: a", "containers: [{name: ''"),
        ] {
            let mut files = Files::default();
            files.take(text(&GOOD.replacen(good, bad, 1)));
            assert!(files.objects().workloads.is_empty(), "{bad}");
        }
    }
}
