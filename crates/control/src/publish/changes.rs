//! The last changes of the configuration, for people who want to see that an edit took effect.

use std::{
    collections::{HashMap, VecDeque},
    time::SystemTime,
};

use serde::Serialize;
use skysail_model::{Change, Diagnostic, Effect, Effects, Object, ObjectKey, World};

/// Changes that are kept, and changes of a batch that are described.
const KEPT: usize = 200;

/// A change of the World.
#[derive(Debug)]
pub(super) struct Applied {
    /// The file.
    pub(super) file: String,
    pub(super) object: ObjectKey,
    /// `applied`, `refused` or `deleted`.
    pub(super) action: &'static str,
    /// The effect of the fallback of a refused policy.
    pub(super) fallback: Option<&'static str>,
    /// The object before, if it is of a kind with an effect of its own.
    pub(super) before: Option<Object>,
}

impl Applied {
    /// Applies a change of a file; `None` if the World stays the same.
    pub(super) fn apply(change: Change, path: &str, world: &mut World) -> Option<Self> {
        let object = change.key();
        let (before, read_in) = world.effective(&object).unzip();
        let read_in = read_in.map(|origin| origin.file.to_string());
        let (file, action, fallback) = match &change {
            Change::Apply(_, origin) => (origin.file.to_string(), "applied", None),
            Change::Fallback(_, origin, effect) => (origin.file.to_string(), "refused", Some(*effect)),
            Change::Delete(_) => (read_in.unwrap_or_else(|| path.to_owned()), "deleted", None),
        };
        change.apply_to(world).then_some(Self { file, object, action, fallback, before })
    }
}

/// A change with an effect.
#[derive(Debug)]
pub(super) struct Described {
    file: String,
    object: ObjectKey,
    action: &'static str,
    effect: String,
}

/// Describes a batch of changes, from the policies before it and the World after it, of which these are the findings. Changes of
/// the same object count as one.
pub(super) fn describe(
    changes: Vec<Applied>,
    before: &World,
    after: &World,
    findings: &[Diagnostic],
) -> Vec<Described> {
    let mut last: HashMap<ObjectKey, (String, &'static str, Option<&'static str>)> = HashMap::new();
    let mut first = Vec::new();
    for Applied { file, object, action, fallback, before } in changes {
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
        Some(Described { file, object, action, effect })
    });
    described.take(KEPT).collect()
}

/// The last changes that have been sent to all proxies, oldest first.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Changes {
    /// Changes since the start, kept or not. The last one kept has this number.
    count: u64,
    kept: VecDeque<Noted>,
}

#[derive(Clone, Debug, Serialize)]
struct Noted {
    /// From 1.
    number: u64,
    /// Seconds since 1970.
    time: u64,
    file: String,
    object: String,
    action: &'static str,
    effect: String,
}

impl Changes {
    /// Notes changes that are in force now.
    pub(super) fn note(&mut self, described: Vec<Described>) {
        let time = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_secs());
        for Described { file, object, action, effect } in described {
            self.count += 1;
            let object = object.to_string();
            self.kept.push_back(Noted { number: self.count, time, file, object, action, effect });
            if self.kept.len() > KEPT {
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
    fn the_last_changes_are_kept_with_their_numbers() {
        let described = |name: String| Described {
            file: "a.yaml".to_owned(),
            object: ObjectKey { kind: Kind::VirtualService, namespace: "shop".to_owned(), name },
            action: "applied",
            effect: "requests to a".to_owned(),
        };
        let mut changes = Changes::default();
        changes.note((0..KEPT + 1).map(|number| described(number.to_string())).collect());
        assert_eq!((changes.count, changes.kept.len()), (KEPT as u64 + 1, KEPT));
        let first = changes.kept.front().unwrap();
        assert_eq!((first.number, &*first.object), (2, "VirtualService shop/1"));
    }

    /// Plays a batch of changed files over one that was there; returns action, object and effect of each change.
    fn played(
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
            applied.extend(changes.into_iter().filter_map(|change| Applied::apply(change, path, &mut world)));
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
    fn what_moved_between_files_is_no_change() {
        let (one, two) = (mutual_tls("one", "STRICT"), mutual_tls("two", "STRICT"));
        assert_eq!(played(&[("a", &one)], &[("a", None), ("b", Some(&one))]), []);
        let edited = format!("# a comment\n{one}");
        assert_eq!(played(&[("a", &one)], &[("a", Some(&edited))]), []);
        let added = format!("{edited}{}", two.replace("shop", "bank"));
        let found = played(&[("a", &one)], &[("a", Some(&added))]);
        let reach = "workloads of namespace bank".to_owned();
        assert_eq!(found, [("applied", "PeerAuthentication bank/two".to_owned(), reach)]);
    }

    #[test]
    fn an_object_that_is_refused_or_has_no_effect_is_not_applied() {
        let (one, two) = (mutual_tls("one", "STRICT"), mutual_tls("two", "STRICT"));
        assert_eq!(played(&[("a", &one)], &[("b", Some(&two))]), [], "another one counts");
        assert_eq!(played(&[("a", &one)], &[("a", Some(&one.replace("STRICT", "STRIKT")))]), []);
        let [(action, object, effect)] = &played(&[], &[("a", Some(&one.replace("STRICT", "STRIKT")))])[..]
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
