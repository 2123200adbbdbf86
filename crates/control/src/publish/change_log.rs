//! Log of the last changes of the configuration and their effects, for the admin page.

use std::{
    collections::{HashMap, VecDeque},
    time::SystemTime,
};

use serde::Serialize;
use skysail_model::{Change, Diagnostic, Effect, Effects, Object, ObjectKey, World};

/// Maximum number of entries, and of descriptions per batch of changes.
const MAX_ENTRIES: usize = 200;

/// A change of the World.
#[derive(Debug)]
pub(super) struct AppliedChange {
    /// Path of the file.
    pub(super) file: String,
    pub(super) object: ObjectKey,
    /// `applied`, `refused` or `deleted`.
    pub(super) action: &'static str,
    /// Effect of the fallback that replaces a refused policy.
    pub(super) fallback: Option<&'static str>,
    /// The object before the change, if its kind has an effect that is described.
    pub(super) before: Option<Object>,
}

impl AppliedChange {
    /// Applies a change of a file. Returns `None` if the World stays the same.
    pub(super) fn apply(change: Change, path: &str, world: &mut World) -> Option<Self> {
        let object = change.key();
        let (before, origin) = world.effective(&object).unzip();
        let origin_file = origin.map(|origin| origin.file.to_string());
        let (file, action, fallback) = match &change {
            Change::Apply(_, origin) => (origin.file.to_string(), "applied", None),
            Change::Fallback(_, origin, effect) => (origin.file.to_string(), "refused", Some(*effect)),
            Change::Delete(_) => (origin_file.unwrap_or_else(|| path.to_owned()), "deleted", None),
        };
        change.apply_to(world).then_some(Self { file, object, action, fallback, before })
    }
}

/// A change and its effect.
#[derive(Debug)]
pub(super) struct ChangeDescription {
    file: String,
    object: ObjectKey,
    /// Action of the change, or `no effect` if the object is not in effect.
    action: &'static str,
    effect: String,
}

/// Describes a batch of changes by the policies before it, the World after it, and the findings about that World.
/// Changes of the same object count as one.
pub(super) fn describe(
    changes: Vec<AppliedChange>,
    before: &World,
    after: &World,
    findings: &[Diagnostic],
) -> Vec<ChangeDescription> {
    let mut last: HashMap<ObjectKey, (String, &'static str, Option<&'static str>)> = HashMap::new();
    let mut first = Vec::new();
    for AppliedChange { file, object, action, fallback, before } in changes {
        if last.insert(object.clone(), (file, action, fallback)).is_none() {
            first.push((object, before));
        }
    }
    let effects = Effects::new(before, after, findings);
    let described = first.into_iter().filter_map(|(object, before)| {
        let Effect { is_in_force, text } = effects.of(&object, before.as_ref())?;
        let (file, action, fallback) = last.remove(&object)?;
        let (action, effect) = match fallback {
            Some(fallback) => (action, format!("until its errors are fixed, {fallback}; {text}")),
            None if is_in_force => (action, text),
            None => ("no effect", text),
        };
        Some(ChangeDescription { file, object, action, effect })
    });
    described.take(MAX_ENTRIES).collect()
}

/// The last published changes, the oldest first.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct ChangeLog {
    /// Number of entries since the start; also the number of the last entry.
    count: u64,
    kept: VecDeque<ChangeLogEntry>,
}

#[derive(Clone, Debug, Serialize)]
struct ChangeLogEntry {
    /// Number of the change, from 1.
    number: u64,
    /// Seconds since 1970.
    time: u64,
    file: String,
    object: String,
    action: &'static str,
    effect: String,
}

impl ChangeLog {
    /// Appends published changes. Removes the oldest entries above [`MAX_ENTRIES`].
    pub(super) fn append(&mut self, descriptions: Vec<ChangeDescription>) {
        let time = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_secs());
        for ChangeDescription { file, object, action, effect } in descriptions {
            self.count += 1;
            let object = object.to_string();
            self.kept.push_back(ChangeLogEntry { number: self.count, time, file, object, action, effect });
            if self.kept.len() > MAX_ENTRIES {
                self.kept.pop_front();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use skysail_model::{Files, Kind};

    use super::*;

    #[test]
    fn the_log_keeps_the_last_changes_with_their_numbers() {
        let described = |name: String| ChangeDescription {
            file: "a.yaml".to_owned(),
            object: ObjectKey { kind: Kind::VirtualService, namespace: "shop".to_owned(), name },
            action: "applied",
            effect: "requests to a".to_owned(),
        };
        let mut changes = ChangeLog::default();
        changes.append((0..MAX_ENTRIES + 1).map(|number| described(number.to_string())).collect());
        assert_eq!((changes.count, changes.kept.len()), (MAX_ENTRIES as u64 + 1, MAX_ENTRIES));
        let first = changes.kept.front().unwrap();
        assert_eq!((first.number, &*first.object), (2, "VirtualService shop/1"));
    }

    /// Applies changed files to existing ones. Returns action, object and effect of each change.
    fn apply_and_describe(
        before: &[(&str, &str)],
        after: &[(&str, Option<&str>)],
    ) -> Vec<(&'static str, String, String)> {
        let (mut world, mut files) = (World::new(), Files::new());
        for (path, text) in before {
            files.set(0, path, text).into_iter().for_each(|change| _ = change.apply_to(&mut world));
        }
        let (policies, mut applied) = (world.policies(), Vec::new());
        for (path, text) in after {
            let changes = match text {
                Some(text) => files.set(0, path, text),
                None => files.remove(0, path),
            };
            applied.extend(
                changes.into_iter().filter_map(|change| AppliedChange::apply(change, path, &mut world)),
            );
        }
        let findings = world.validate();
        let described = describe(applied, &policies, &world, &findings);
        described.into_iter().map(|of| (of.action, of.object.to_string(), of.effect)).collect()
    }

    fn mutual_tls(name: &str, mode: &str) -> String {
        format!(
            "---\napiVersion: security.istio.io/v1\nkind: PeerAuthentication\nmetadata: {{name: {name}, namespace: shop}}\nspec: {{mtls: {{mode: {mode}}}}}\n"
        )
    }

    #[test]
    fn an_object_that_moves_between_files_does_not_change() {
        let (one, two) = (mutual_tls("one", "STRICT"), mutual_tls("two", "STRICT"));
        assert_eq!(apply_and_describe(&[("a", &one)], &[("a", None), ("b", Some(&one))]), []);
        let edited = format!("# a comment\n{one}");
        assert_eq!(apply_and_describe(&[("a", &one)], &[("a", Some(&edited))]), []);
        let added = format!("{edited}{}", two.replace("shop", "bank"));
        let found = apply_and_describe(&[("a", &one)], &[("a", Some(&added))]);
        let reach = "workloads of namespace bank".to_owned();
        assert_eq!(found, [("applied", "PeerAuthentication bank/two".to_owned(), reach)]);
    }

    #[test]
    fn a_refused_object_and_one_without_effect_are_not_applied() {
        let (one, two) = (mutual_tls("one", "STRICT"), mutual_tls("two", "STRICT"));
        assert_eq!(
            apply_and_describe(&[("a", &one)], &[("b", Some(&two))]),
            [],
            "the policy with another name takes precedence"
        );
        assert_eq!(apply_and_describe(&[("a", &one)], &[("a", Some(&one.replace("STRICT", "STRIKT")))]), []);
        let [(action, object, effect)] =
            &apply_and_describe(&[], &[("a", Some(&one.replace("STRICT", "STRIKT")))])[..]
        else {
            panic!("one change")
        };
        assert_eq!((*action, &**object), ("refused", "PeerAuthentication shop/one"));
        assert!(
            effect.starts_with("until its errors are fixed, the workloads that it selects accept"),
            "{effect}"
        );
    }
}
