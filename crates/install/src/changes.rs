//! What an application of objects changes.

use std::fmt;

use serde_json::Value;

/// Effect of an application on an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// It did not exist.
    Created,
    /// It had other fields.
    Changed,
    /// It has the same fields.
    Unchanged,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Created => "created",
            Self::Changed => "changed",
            Self::Unchanged => "unchanged",
        })
    }
}

impl Change {
    /// Compares an object before an application, if it existed, and after it.
    pub(crate) fn between(before: Option<Value>, after: Value) -> Self {
        let Some(before) = before else { return Self::Created };
        if configuration(before) == configuration(after) { Self::Unchanged } else { Self::Changed }
    }
}

/// Returns an object without what the cluster itself changes.
fn configuration(mut object: Value) -> Value {
    if let Some(fields) = object.as_object_mut() {
        fields.remove("status");
    }
    if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
        for field in ["managedFields", "resourceVersion", "generation"] {
            metadata.remove(field);
        }
    }
    object
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn versions_and_status_are_no_change() {
        let before = json!({ "metadata": { "name": "a", "resourceVersion": "1" }, "spec": 1, "status": 1 });
        let mut after = json!({ "metadata": { "name": "a", "resourceVersion": "2", "managedFields": [] },
                                "spec": 1, "status": 2 });
        assert_eq!(Change::between(Some(before.clone()), after.clone()), Change::Unchanged);
        assert_eq!(Change::between(None, after.clone()), Change::Created);
        after["spec"] = 2.into();
        assert_eq!(Change::between(Some(before), after), Change::Changed);
    }
}
