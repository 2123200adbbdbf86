//! A set of files as one configuration. Decides which definition of an object takes effect, and what stays in effect
//! when a file is broken.
//!
//! Files are in layers. An object of a higher layer replaces that of a lower one. Within a layer the last file by name
//! takes effect, as with `kubectl apply -f FOLDER`. The other definitions are reported if their content differs.
//!
//! One layer may hold generated objects. They replace those of the user without a report, and messages about them name
//! the user's object.
//!
//! If a new version of an object is refused, or a document cannot be read at all, the last good one stays in effect.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use crate::{
    analysis::Code,
    api::{Object, ObjectKey},
    diagnostic::{Diagnostic, Severity},
    origin::Origin,
    parse::{Fallback, Parsed, Refused, parse},
    world::World,
};

/// Files and their objects.
#[derive(Debug, Default)]
pub struct Files {
    files: BTreeMap<FileKey, File>,
    /// Files that define each object; the last one takes effect.
    places: BTreeMap<Arc<ObjectKey>, Vec<FileKey>>,
    /// Layer of the objects that a program generated from those of lower layers.
    generated: Option<usize>,
}

/// Layer and path of a file.
type FileKey = (usize, Arc<str>);

#[derive(Debug, Default)]
struct File {
    objects: BTreeMap<Arc<ObjectKey>, HeldObject>,
    diagnostics: Vec<Diagnostic>,
    /// Objects of kinds that do not affect the mesh, by kind: the line of the first, and their number.
    foreign: BTreeMap<String, (u32, usize)>,
    /// Refused objects and the lines of their first errors.
    refused: BTreeMap<ObjectKey, u32>,
}

/// An object of a file.
#[derive(Clone, Debug, PartialEq)]
struct HeldObject {
    object: Object,
    origin: Origin,
    /// Effect of the object if it is the fallback of a refused policy.
    fallback: Option<&'static str>,
}

/// Change of the World that follows from a changed file.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// The object is new or different.
    Apply(Object, Origin),
    /// A policy was refused and no valid version is known. This object with this effect takes its place.
    Fallback(Object, Origin, &'static str),
    /// The object was removed.
    Delete(ObjectKey),
}

impl Change {
    /// Returns the key of the object.
    pub fn key(&self) -> ObjectKey {
        match self {
            Self::Apply(object, _) | Self::Fallback(object, ..) => object.key(),
            Self::Delete(key) => key.clone(),
        }
    }

    /// Applies the change. Returns false if nothing changed.
    pub fn apply_to(self, world: &mut World) -> bool {
        match self {
            Self::Apply(object, origin) | Self::Fallback(object, origin, _) => world.apply(object, origin),
            Self::Delete(key) => world.delete(&key),
        }
    }
}

impl Files {
    /// Creates an empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates an empty set whose layer `generated` holds objects that a program generated from lower layers: Services
    /// with addresses, Pods of Deployments. Messages about such an object name the file of the original object. Errors
    /// of the object itself are reported only there.
    pub fn with_generated(generated: usize) -> Self {
        Self { generated: Some(generated), ..Self::default() }
    }

    /// Parses the new text of a file. Returns the changes of the World.
    pub fn set(&mut self, layer: usize, path: &str, text: &str) -> Vec<Change> {
        self.take(layer, path, parse(text, path))
    }

    /// Replaces a file by its parsed new text. Returns the changes of the World.
    pub fn take(&mut self, layer: usize, path: &str, parsed: Parsed) -> Vec<Change> {
        let place = (layer, Arc::from(path));
        let before = self.files.remove(&place).unwrap_or_default();
        let mut after = File::read(parsed, &before);
        if self.generated == Some(layer) {
            after.diagnostics.retain(|diagnostic| diagnostic.severity == Severity::Error);
        }
        let changes = self.changes(&place, &before, &after);
        self.files.insert(place, after);
        changes
    }

    /// Removes a file. Returns the changes of the World.
    pub fn remove(&mut self, layer: usize, path: &str) -> Vec<Change> {
        let place = (layer, Arc::from(path));
        let before = self.files.remove(&place).unwrap_or_default();
        self.changes(&place, &before, &File::default())
    }

    /// Returns the paths of the files in a layer.
    pub fn paths(&self, layer: usize) -> impl Iterator<Item = &str> {
        self.files.keys().filter(move |(of, _)| *of == layer).map(|(_, path)| &**path)
    }

    /// Returns the diagnostics of files and of single objects.
    pub fn diagnostics(&self) -> Vec<Diagnostic> {
        let of_files = self.files.values().flat_map(|file| &file.diagnostics).cloned();
        let mut diagnostics: Vec<Diagnostic> =
            of_files.chain(self.duplicates()).chain(self.foreign()).chain(self.without_version()).collect();
        diagnostics.sort();
        diagnostics
    }

    /// Returns one diagnostic for each kind that the mesh does not use, at its first object.
    fn foreign(&self) -> impl Iterator<Item = Diagnostic> {
        let mut kinds: BTreeMap<&str, (&str, u32, usize)> = BTreeMap::new();
        for ((_, path), file) in &self.files {
            for (kind, (line, count)) in &file.foreign {
                kinds.entry(kind).or_insert((path, *line, 0)).2 += count;
            }
        }
        kinds.into_iter().map(|(kind, (path, line, count))| {
            let objects = if count == 1 { "object" } else { "objects" };
            let message = format!("the mesh does not use {kind} ({count} {objects})");
            Diagnostic::new(Code::ForeignKind, path, line, message)
        })
    }

    /// Returns a diagnostic for each refused policy without a valid version, with the effect of its fallback if it has
    /// one.
    fn without_version(&self) -> impl Iterator<Item = Diagnostic> {
        let refused = self
            .files
            .iter()
            .flat_map(|(place, file)| file.refused.iter().map(move |(key, line)| (place, file, key, *line)));
        refused.filter(|(_, _, key, _)| key.kind.has_fallback() && !self.has_valid(key)).filter_map(
            |(place, file, key, line)| {
                let message = match file.objects.get(key).and_then(|held| held.fallback) {
                    Some(effect) => format!("until its errors are fixed, {effect}"),
                    None if key.kind.is_policy() => "no version of this policy is in effect".to_owned(),
                    None => return None,
                };
                Some(Diagnostic::new(Code::PolicyFallback, &place.1, line, message).object(key))
            },
        )
    }

    /// Returns whether a file has a valid version of an object.
    fn has_valid(&self, key: &ObjectKey) -> bool {
        let held = |place| self.files.get(place)?.objects.get(key);
        self.places.get(key).into_iter().flatten().filter_map(held).any(|held| held.fallback.is_none())
    }

    /// Returns the changes of the World when a file changes from `before` to `after`, and updates the index. The file
    /// itself must not be in `self.files`.
    fn changes(&mut self, place: &FileKey, before: &File, after: &File) -> Vec<Change> {
        let keys: BTreeSet<&Arc<ObjectKey>> = before.objects.keys().chain(after.objects.keys()).collect();
        let mut changes = Vec::new();
        for key in keys {
            let old = self.effective(key, place, before);
            match self.effective(key, place, after) {
                // An object that only moved is applied too, so that messages about it name the right line.
                Some(new) if old != Some(new) => {
                    let (object, origin) = (new.0.object.clone(), new.1.clone());
                    changes.push(match new.0.fallback {
                        Some(effect) => Change::Fallback(object, origin, effect),
                        None => Change::Apply(object, origin),
                    });
                }
                Some(_) => {}
                None => changes.push(Change::Delete(ObjectKey::clone(key))),
            }
            self.record(key, place, after.objects.contains_key(key));
        }
        changes
    }

    /// Returns the definition that takes effect: that of the highest layer, and there that of the last file. A valid
    /// object takes precedence over a fallback.
    fn effective<'a>(
        &'a self,
        key: &ObjectKey,
        place: &FileKey,
        file: &'a File,
    ) -> Option<(&'a HeldObject, &'a Origin)> {
        let others = self.places.get(key).into_iter().flatten().filter(|other| *other != place);
        let others = others.filter_map(|other| Some((other, self.files.get(other)?.objects.get(key)?)));
        let own = file.objects.get(key).map(|own| (place, own));
        let mut all: Vec<(&FileKey, &HeldObject)> = others.chain(own).collect();
        all.sort_by_key(|(place, held)| (held.fallback.is_none(), *place));
        let (place, held) = all.pop()?;
        let written = all.pop().filter(|_| self.generated == Some(place.0));
        Some((held, written.map_or(&held.origin, |(_, written)| &written.origin)))
    }

    /// Records whether a file has an object.
    fn record(&mut self, key: &Arc<ObjectKey>, place: &FileKey, is_there: bool) {
        // Most objects are defined in one file.
        let places = self.places.entry(Arc::clone(key)).or_insert_with(|| Vec::with_capacity(1));
        match places.binary_search(place) {
            Err(at) if is_there => places.insert(at, place.clone()),
            Ok(at) if !is_there => _ = places.remove(at),
            _ => {}
        }
        if places.is_empty() {
            self.places.remove(key);
        }
    }

    /// Returns the diagnostics of objects that several files define. The generated layer is exempt.
    fn duplicates(&self) -> Vec<Diagnostic> {
        let valid = |held: &&HeldObject| held.fallback.is_none();
        let origin = |place, key| Some(&self.files.get(place)?.objects.get(key).filter(valid)?.origin);
        let pairs = self.places.iter().flat_map(|(key, places)| {
            let pairs = places.array_windows().filter(|[_, next]| Some(next.0) != self.generated);
            pairs.map(move |pair| (key, pair))
        });
        let messages = pairs.filter_map(|(key, [other, effective])| {
            duplicate(key, origin(other, key)?, origin(effective, key)?)
        });
        messages.collect()
    }
}

impl File {
    /// Creates a file from its parsed text. Refused and unreadable objects keep their last version.
    fn read(parsed: Parsed, before: &Self) -> Self {
        let mut file = Self { diagnostics: parsed.diagnostics, foreign: parsed.foreign, ..Self::default() };
        for (object, origin) in parsed.objects {
            let key = Arc::new(object.key());
            let held = HeldObject { object, origin: origin.clone(), fallback: None };
            if let Some(other) = file.objects.insert(Arc::clone(&key), held) {
                file.diagnostics.extend(duplicate(&key, &other.origin, &origin));
            }
        }
        for (key, kept) in &before.objects {
            let is_refused = parsed.refused.contains_key(&**key);
            // A fallback is kept only while the text is unreadable: a refused policy comes with a new fallback.
            if (parsed.unreadable && !is_refused || is_refused && kept.fallback.is_none())
                && !file.objects.contains_key(key)
            {
                let (code, message) = match kept.fallback {
                    Some(effect) => (Code::PolicyFallback, format!("until its errors are fixed, {effect}")),
                    None => (
                        Code::LastVersionKept,
                        "the last valid version stays in effect until the errors in this file are fixed"
                            .to_owned(),
                    ),
                };
                let origin = &kept.origin;
                let diagnostic = Diagnostic::new(code, &origin.file, origin.line, message);
                file.diagnostics.push(diagnostic.object(key));
                file.objects.insert(Arc::clone(key), kept.clone());
            }
        }
        for (key, Refused { line, fallback }) in parsed.refused {
            if let Some(Fallback { object, origin, effect }) = fallback {
                let held = HeldObject { object, origin, fallback: Some(effect) };
                file.objects.entry(Arc::new(key.clone())).or_insert(held);
            }
            file.refused.insert(key, line);
        }
        file
    }
}

/// Returns the diagnostic for an object that is defined again, or `None` if both definitions are equal.
fn duplicate(key: &ObjectKey, other: &Origin, effective: &Origin) -> Option<Diagnostic> {
    if other.content == effective.content {
        return None;
    }
    let message = format!(
        "has no effect: {}:{} defines the object again, and the last definition counts",
        effective.file, effective.line
    );
    let diagnostic = Diagnostic::new(Code::DuplicateObject, &other.file, other.line, message);
    Some(diagnostic.object(key).remedy("remove one of them"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{Labels, MtlsMode};

    const RULE: &str = "apiVersion: networking.istio.io/v1\nkind: DestinationRule\nmetadata: {name: NAME}\nspec: {host: HOST}\n";

    fn rule(name: &str, host: &str) -> String {
        RULE.replace("NAME", name).replace("HOST", host)
    }

    fn hosts(world: &World) -> Vec<String> {
        let found = ["a", "b", "c"]
            .iter()
            .filter(|host| world.destination_rule(&crate::world::fqdn(host, "default"), "default").is_some());
        found.map(|host| (*host).to_owned()).collect()
    }

    fn play(steps: &[(usize, &str, Option<String>)]) -> (World, Files) {
        let (mut world, mut files) = (World::new(), Files::new());
        for (layer, path, text) in steps {
            let changes = match text {
                Some(text) => files.set(*layer, path, text),
                None => files.remove(*layer, path),
            };
            for change in changes {
                change.apply_to(&mut world);
            }
        }
        (world, files)
    }

    #[test]
    fn a_higher_layer_takes_precedence_and_is_reported() {
        let steps = [(0, "x", Some(rule("r", "a"))), (1, "y", Some(rule("r", "b")))];
        let (world, files) = play(&steps);
        assert_eq!(hosts(&world), ["b"]);
        let findings = files.diagnostics();
        assert!(
            findings.len() == 1 && findings[0].file == "x" && findings[0].message.contains("y:1 defines"),
            "{findings:?}"
        );
        let (world, _) = play(&[steps.as_slice(), &[(1, "y", None)]].concat());
        assert_eq!(hosts(&world), ["a"]);
    }

    #[test]
    fn messages_about_generated_objects_name_the_users_object() {
        let service = |address: &str| {
            format!(
                "apiVersion: v1\nkind: Service\nmetadata: {{name: a}}\nspec:\n  {address}\n  selector: {{app: a}}\n  ports:\n  - {{port: 80, typo: x}}\n"
            )
        };
        let mut files = Files::with_generated(1);
        files.set(0, "mine", &service("type: ClusterIP"));
        let changes = files.set(1, "generated", &service("clusterIP: 10.96.0.1"));
        let [Change::Apply(Object::Service(object), origin)] = &changes[..] else { panic!("{changes:?}") };
        assert_eq!((object.spec.cluster_ips.len(), &*origin.file, origin.line), (1, "mine", 1));
        let own = files.diagnostics();
        assert_eq!(own.iter().map(|found| (&*found.file, found.line)).collect::<Vec<_>>(), [("mine", 8)]);
        // Without a generated layer the higher layer takes effect and is named.
        let mut files = Files::new();
        files.set(0, "mine", &service("type: ClusterIP"));
        let changes = files.set(1, "other", &service("clusterIP: 10.96.0.1"));
        assert!(
            matches!(&changes[..], [Change::Apply(_, origin)] if &*origin.file == "other"),
            "{changes:?}"
        );
    }

    #[test]
    fn within_a_layer_the_last_file_by_name_takes_effect() {
        let (world, files) = play(&[(0, "y", Some(rule("r", "b"))), (0, "x", Some(rule("r", "a")))]);
        assert_eq!(hosts(&world), ["b"]);
        let findings = files.diagnostics();
        assert_eq!(findings.len(), 1);
        assert_eq!(
            findings[0].to_string(),
            "x:1: warning: DestinationRule default/r: has no effect: y:1 defines the object again, and the last definition counts; remove one of them [SKY0012]"
        );
        let (world, files) = play(&[(0, "x", Some(format!("{}---\n{}", rule("r", "a"), rule("r", "b"))))]);
        assert_eq!(hosts(&world), ["b"]);
        assert_eq!(files.diagnostics().len(), 1);
    }

    #[test]
    fn a_repeated_definition_is_reported_only_if_it_differs() {
        let pod =
            "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: {containers: [{name: a, image: a}]}\n";
        let copy = format!("# A comment.\n{pod}");
        let (_, files) = play(&[(0, "x", Some(pod.to_owned())), (1, "y", Some(copy))]);
        assert_eq!(files.diagnostics(), []);
        // The mesh itself does not use images.
        let other = pod.replace("image: a", "image: b");
        let (_, files) = play(&[(0, "x", Some(pod.to_owned())), (1, "y", Some(other))]);
        assert_eq!(files.diagnostics().len(), 1);
    }

    #[test]
    fn a_broken_version_leaves_the_last_good_one_in_force() {
        let good = format!("{}---\n{}", rule("r", "a"), rule("s", "b"));
        let refused = format!("{}---\n{}", rule("r", "http://a"), rule("s", "c"));
        let (world, files) = play(&[(0, "x", Some(good.clone())), (0, "x", Some(refused))]);
        assert_eq!(hosts(&world), ["a", "c"]);
        assert!(
            files
                .diagnostics()
                .iter()
                .any(|finding| finding.message.contains("the last valid version stays in effect"))
        );

        let unreadable = format!("{}---\nkind: [", rule("r", "c"));
        let (world, _) = play(&[(0, "x", Some(good.clone())), (0, "x", Some(unreadable))]);
        assert_eq!(hosts(&world), ["b", "c"]);

        let (world, _) = play(&[(0, "x", Some(good)), (0, "x", Some(rule("s", "b")))]);
        assert_eq!(hosts(&world), ["b"], "what was taken out is gone");
    }

    #[test]
    fn a_refused_policy_without_a_valid_version_has_a_fallback() {
        let policy = |mode: &str| {
            Some(format!(
                "apiVersion: security.istio.io/v1\nkind: PeerAuthentication\nmetadata: {{name: p}}\nspec: {{mtls: {{mode: {mode}}}}}\n"
            ))
        };
        let after = |steps: &[(usize, &str, Option<String>)]| {
            let (world, files) = play(steps);
            let mode = world.workload_mode("default", &Labels::new());
            let findings = files.diagnostics();
            (mode, findings.iter().any(|finding| finding.message.starts_with("until its errors are fixed")))
        };
        let broken = (0, "x", policy("STRIKT"));
        assert_eq!(after(std::slice::from_ref(&broken)), (MtlsMode::Strict, true));
        assert_eq!(after(&[broken.clone(), broken.clone()]), (MtlsMode::Strict, true));
        assert_eq!(after(&[broken.clone(), (0, "x", policy("DISABLE"))]), (MtlsMode::Disable, false));
        assert_eq!(after(&[broken.clone(), (0, "x", None)]), (MtlsMode::Permissive, false));
        assert_eq!(after(&[broken.clone(), (0, "x", Some("{".to_owned()))]), (MtlsMode::Strict, true));
        assert_eq!(after(&[(0, "x", policy("DISABLE")), broken.clone()]), (MtlsMode::Disable, false));
        // A valid version takes precedence, in whichever file it is.
        assert_eq!(after(&[broken.clone(), (1, "y", policy("DISABLE"))]), (MtlsMode::Disable, false));
        assert_eq!(after(&[(0, "a", policy("DISABLE")), broken]), (MtlsMode::Disable, false));
    }

    #[test]
    fn objects_of_each_foreign_kind_are_reported_in_one_line() {
        let role = "---\napiVersion: rbac.authorization.k8s.io/v1\nkind: Role\nmetadata: {name: a}\n";
        let (_, files) = play(&[(0, "x", Some(role.repeat(2))), (0, "y", Some(role.to_owned()))]);
        let findings: Vec<_> = files.diagnostics().iter().map(ToString::to_string).collect();
        assert_eq!(
            findings,
            ["x:2: info: the mesh does not use Role of rbac.authorization.k8s.io (3 objects) [SKY0007]"]
        );
    }

    #[test]
    fn a_misspelt_group_or_kind_leaves_the_last_good_object_in_force() {
        let good = rule("r", "a");
        for (right, wrong) in
            [("networking.istio.io", "networking.istio.com"), ("DestinationRule", "DestinationRul")]
        {
            let (world, files) =
                play(&[(0, "x", Some(good.clone())), (0, "x", Some(good.replace(right, wrong)))]);
            assert_eq!(hosts(&world), ["a"]);
            let findings = files.diagnostics();
            assert!(findings.iter().any(|finding| finding.severity == Severity::Error), "{findings:?}");
        }
    }

    #[test]
    fn unchanged_objects_are_not_applied_and_moved_ones_change_nothing() {
        let (mut world, mut files) = (World::new(), Files::new());
        let mut set = |text: &str| -> Vec<bool> {
            files.set(0, "x", text).into_iter().map(|change| change.apply_to(&mut world)).collect()
        };
        assert_eq!(set(&rule("r", "a")), [true]);
        assert_eq!(set(&format!("{}# a comment\n", rule("r", "a"))), [false; 0]);
        assert_eq!(set(&format!("# a comment\n{}", rule("r", "a"))), [false]);
    }
}
