//! Identity of an object that may be invalid.

use skysail_yaml::Node;

use super::kinds::{self, DocumentKind};
use crate::api::{ObjectKey, kube};

/// Returns the key of this object, or of the object that was probably meant. `None` if the mesh does not use the kind,
/// or the object has no name.
pub(super) fn key_of(root: &Node) -> Option<ObjectKey> {
    let text = |node: &Node, field: &str| node.get(field).and_then(Node::text).map(ToOwned::to_owned);
    let kind = match kinds::classify(&text(root, "apiVersion")?, &text(root, "kind")?) {
        DocumentKind::Kind(kind) | DocumentKind::Other { meant: Some(kind), .. } => kind,
        DocumentKind::Other { meant: None, .. } | DocumentKind::Foreign(_) => return None,
    };
    let meta = root.get("metadata")?;
    let namespace = text(meta, "namespace").unwrap_or_else(|| kube::DEFAULT_NAMESPACE.to_owned());
    let namespace = if kind.is_namespaced() { namespace } else { String::new() };
    Some(ObjectKey { kind, namespace, name: text(meta, "name")? })
}

/// Names an object that may be invalid: `VirtualService default/reviews`.
pub(super) fn describe(root: &Node) -> String {
    let Some(kind) = root.get("kind").and_then(Node::text) else { return String::new() };
    if let Some(key) = key_of(root).filter(|key| key.kind.as_str() == kind) {
        return key.to_string();
    }
    let meta = |field: &str| root.get("metadata").and_then(|meta| meta.get(field)).and_then(Node::text);
    let name = meta("name").unwrap_or("(unnamed)");
    match meta("namespace") {
        Some(namespace) => format!("{kind} {namespace}/{name}"),
        None => format!("{kind} {name}"),
    }
}
