//! The last changes of the configuration, for people who want to see that an edit took effect.

use std::{collections::VecDeque, time::SystemTime};

use serde::Serialize;
use skysail_model::ObjectKey;

/// Changes that are kept, and that are described of those that come together.
pub(super) const KEPT: usize = 200;

/// A change of the configuration that had an effect.
#[derive(Debug)]
pub(super) struct Applied {
    /// The file.
    pub(super) file: String,
    pub(super) object: ObjectKey,
    /// `applied` or `deleted`.
    pub(super) action: &'static str,
    /// What it has an effect on, if that is worth a line.
    pub(super) effect: Option<String>,
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
    pub(super) fn note(&mut self, applied: Vec<Applied>) {
        let time = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_secs());
        for Applied { file, object, action, effect } in applied {
            let Some(effect) = effect else { continue };
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
    use skysail_model::Kind;

    use super::*;

    #[test]
    fn the_last_changes_are_kept_with_their_numbers() {
        let applied = |name: String| Applied {
            file: "a.yaml".to_owned(),
            object: ObjectKey { kind: Kind::VirtualService, namespace: "shop".to_owned(), name },
            action: "applied",
            effect: Some("requests to a".to_owned()),
        };
        let mut changes = Changes::default();
        changes.note((0..KEPT + 1).map(|number| applied(number.to_string())).collect());
        changes.note(vec![Applied { effect: None, ..applied("pod".to_owned()) }]);
        assert_eq!((changes.count, changes.kept.len()), (KEPT as u64 + 1, KEPT));
        let first = changes.kept.front().unwrap();
        assert_eq!((first.number, &*first.object), (2, "VirtualService shop/1"));
    }
}
