//! The table of fields: what the mesh does with each field of each kind, and which tests show it.
//!
//! `crates/model/fields/NAME.txt` has a line for each field: path, support, note and tests, separated by ` | `. Paths
//! have no list positions and begin below `spec`. This is the only list: validation reports the fields that it marks,
//! `docs/fields.md` is generated from it, and `crates/model/tests/fields` compares it with the types and with the
//! tests.
//!
//! | support | meaning |
//! |---|---|
//! | `supported` | works as in Istio or as the API's specification says |
//! | `part` | works with the limits in the note |
//! | `deprecated` | works; a warning names the note as the remedy |
//! | `warned` | no effect, or the effect in the note; a warning names the field |
//! | `refused` | an error refuses the object |
//! | `unread` | concerns the cluster or an installation, not the mesh |
//! | `as PATH` | has the fields of another path of the kind, with the same support |
//!
//! A path may end in `=VALUE`: the line then concerns this value of the field only.

use std::{collections::HashMap, sync::LazyLock};

use crate::api::Kind;

/// Support of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Support {
    /// Works.
    Supported,
    /// Works with the limits in the note.
    Part,
    /// Works; a warning names the remedy.
    Deprecated,
    /// Has no effect, or the effect in the note; a warning names it.
    Warned,
    /// An error refuses the object.
    Refused,
    /// Concerns the cluster or an installation; not read.
    Unread,
    /// Has the fields of this path.
    As(&'static str),
}

/// A line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldRow {
    /// Path without list positions; `*` is any key of a mapping.
    pub path: &'static str,
    /// Value that the line concerns; `None`: every value.
    pub value: Option<&'static str>,
    /// Support.
    pub support: Support,
    /// Limits, effect or remedy; may be empty.
    pub note: &'static str,
    /// Tests of the behaviour, as `FILE::FUNCTION` below `tests`.
    pub tests: Vec<&'static str>,
}

/// The fields of a kind.
#[derive(Debug)]
pub struct KindFields {
    /// Name of the kind, as a heading.
    pub name: &'static str,
    /// Kind of the objects that have the fields.
    pub kind: Kind,
    /// Fields in the order of the types.
    pub fields: Vec<FieldRow>,
}

/// Defines the tables of all kinds. `crates/model/fields` has their texts.
macro_rules! tables {
    ($($name:literal $kind:ident,)*) => {
        /// Name, kind and table of each kind.
        const TABLES: &[(&str, Kind, &str)] =
            &[$(($name, Kind::$kind, include_str!(concat!("../fields/", $name, ".txt"))),)*];
    };
}

tables! {
    "VirtualService" VirtualService,
    "DestinationRule" DestinationRule,
    "Gateway" Gateway,
    "ServiceEntry" ServiceEntry,
    "WorkloadEntry" WorkloadEntry,
    "WorkloadGroup" WorkloadGroup,
    "Sidecar" Sidecar,
    "PeerAuthentication" PeerAuthentication,
    "RequestAuthentication" RequestAuthentication,
    "AuthorizationPolicy" AuthorizationPolicy,
    "Telemetry" Telemetry,
    "ProxyConfig" ProxyConfig,
    "EnvoyFilter" EnvoyFilter,
    "MeshConfig" ConfigMap,
    "MeshNetworks" ConfigMap,
    "Service" Service,
    "Ingress" Ingress,
    "IngressClass" IngressClass,
    "GatewayClass" GatewayClass,
    "Gateway of Gateway API" KubernetesGateway,
    "ListenerSet" ListenerSet,
    "HTTPRoute" HttpRoute,
    "GRPCRoute" GrpcRoute,
    "TLSRoute" TlsRoute,
    "TCPRoute" TcpRoute,
    "ReferenceGrant" ReferenceGrant,
    "BackendTLSPolicy" BackendTlsPolicy,
    "WasmPlugin" WasmPlugin,
    "TrafficExtension" TrafficExtension,
    "RateLimitPolicy" RateLimitPolicy,
}

/// Fields of all kinds.
static KINDS: LazyLock<Vec<KindFields>> = LazyLock::new(|| {
    let kinds = TABLES.iter();
    kinds.map(|(name, kind, text)| KindFields { name, kind: *kind, fields: lines(text).collect() }).collect()
});

/// Marked fields of each kind, for validation; for ConfigMaps, those of the mesh configuration.
static MARKED: LazyLock<HashMap<Kind, Marked>> = LazyLock::new(|| {
    let kinds = KINDS.iter().filter(|kind| kind.name != "MeshNetworks");
    kinds.map(|kind| (kind.kind, Marked::of(&kind.fields))).filter(|(_, marked)| marked.any).collect()
});

/// Returns the fields of all kinds.
pub fn kinds() -> &'static [KindFields] {
    &KINDS
}

/// Returns the support of a setting of the mesh configuration, or of the nearest enclosing one that has a line.
pub(crate) fn mesh_setting(path: &str) -> Option<Support> {
    let bare: String =
        path.split('[').map(|part| part.split_once(']').map_or(part, |(_, rest)| rest)).collect();
    let mesh = KINDS.iter().find(|kind| kind.name == "MeshConfig")?;
    let of = |path: &str| mesh.fields.iter().find(|field| field.path == path && field.value.is_none());
    let above = bare.rmatch_indices('.').map(|(end, _)| &bare[..end]);
    [bare.as_str()].into_iter().chain(above).find_map(of).map(|field| field.support)
}

/// Returns the line of a setting of proxies in the mesh configuration that validation reports.
pub(crate) fn proxy_setting(name: &str) -> Option<&'static FieldRow> {
    reported_mesh_setting(&format!("defaultConfig.{name}"))
}

/// Returns the line of a setting of the mesh configuration about which validation reports something.
pub(crate) fn reported_mesh_setting(path: &str) -> Option<&'static FieldRow> {
    let mesh = KINDS.iter().find(|kind| kind.name == "MeshConfig")?;
    let is_it = |field: &&FieldRow| field.path == path;
    mesh.fields.iter().filter(|field| field.is_reported() && field.value.is_none()).find(is_it)
}

/// Returns the fields of a kind about which validation reports something.
pub(crate) fn marked(kind: Kind) -> Option<&'static Marked> {
    MARKED.get(&kind)
}

/// Parses a table.
fn lines(text: &'static str) -> impl Iterator<Item = FieldRow> {
    text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).filter_map(FieldRow::parse)
}

impl FieldRow {
    fn parse(line: &'static str) -> Option<Self> {
        let mut cells = line.split(" |").map(str::trim);
        let (path, support, note, tests) = (cells.next()?, cells.next()?, cells.next()?, cells.next()?);
        let (path, value) = path.split_once('=').map_or((path, None), |(path, value)| (path, Some(value)));
        let support = match support {
            "supported" => Support::Supported,
            "part" => Support::Part,
            "deprecated" => Support::Deprecated,
            "warned" => Support::Warned,
            "refused" => Support::Refused,
            "unread" => Support::Unread,
            other => Support::As(other.strip_prefix("as ")?),
        };
        Some(Self { path, value, support, note, tests: tests.split_whitespace().collect() })
    }

    /// Returns whether validation reports the field.
    pub fn is_reported(&self) -> bool {
        matches!(self.support, Support::Deprecated | Support::Warned | Support::Refused)
    }

    /// Returns the effect in the note, and the remedy, which follows the first semicolon.
    pub fn effect(&self) -> (&'static str, &'static str) {
        self.note.split_once("; ").unwrap_or((self.note, ""))
    }
}

/// Tree of the fields of a kind that are reported, to search an object in one pass.
#[derive(Debug, Default)]
pub(crate) struct Marked {
    nodes: Vec<MarkedNode>,
    /// Whether a field is reported at all.
    any: bool,
}

/// A field and those below it.
#[derive(Debug, Default)]
struct MarkedNode {
    children: Vec<(&'static str, usize)>,
    /// Another node whose children are those of this one; `None`: `children`.
    same: Option<usize>,
    reported: Vec<FieldRow>,
}

impl Marked {
    /// The node of the whole object.
    pub(crate) const ROOT: usize = 0;

    fn of(fields: &[FieldRow]) -> Self {
        let mut tree = Self { nodes: vec![MarkedNode::default()], any: false };
        for field in fields {
            if let Support::As(target) = field.support {
                let (node, target) = (tree.insert(field.path), tree.insert(target));
                tree.nodes[node].same = Some(target);
            } else if field.is_reported() {
                let node = tree.insert(field.path);
                tree.nodes[node].reported.push(field.clone());
                tree.any = true;
            }
        }
        tree
    }

    fn insert(&mut self, path: &'static str) -> usize {
        path.split('.').fold(Self::ROOT, |node, key| {
            self.nodes[node]
                .children
                .iter()
                .find(|(known, _)| *known == key)
                .map(|(_, child)| *child)
                .unwrap_or_else(|| {
                    let child = self.nodes.len();
                    self.nodes.push(MarkedNode::default());
                    self.nodes[node].children.push((key, child));
                    child
                })
        })
    }

    /// Returns the node of a key below a node, if a reported field may be there.
    pub(crate) fn child(&self, node: usize, key: &str) -> Option<usize> {
        let node = self.nodes.get(node)?;
        let children =
            node.same.and_then(|same| self.nodes.get(same)).map_or(&node.children, |same| &same.children);
        children.iter().find(|(known, _)| *known == key || *known == "*").map(|(_, child)| *child)
    }

    /// Returns the reported lines of a node.
    pub(crate) fn reported(&self, node: usize) -> &[FieldRow] {
        self.nodes.get(node).map_or(&[], |node| &node.reported)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_of_the_table_is_read() {
        for ((name, _, text), kind) in TABLES.iter().zip(kinds()) {
            let written = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).count();
            assert_eq!(kind.fields.len(), written, "{name}");
        }
    }

    #[test]
    fn marked_fields_are_found_through_references() {
        let tree = Marked::of(
            &lines("a.b | warned | n |\nc | as a | |\nd.* | as a | |\ne | supported | |").collect::<Vec<_>>(),
        );
        let at = |path: &str| path.split('.').try_fold(Marked::ROOT, |node, key| tree.child(node, key));
        for path in ["a.b", "c.b", "d.any.b"] {
            assert_eq!(at(path).map(|node| tree.reported(node).len()), Some(1), "{path}");
        }
        assert_eq!(at("e"), None);
    }

    #[test]
    fn settings_of_the_mesh_are_found() {
        assert_eq!(mesh_setting("certificates[0].secretName"), Some(Support::Unread));
        assert_eq!(mesh_setting("defaultConfig.statusPort"), Some(Support::Warned));
        assert_eq!(mesh_setting("defaultConfig.proxyHeader"), None);
    }
}
