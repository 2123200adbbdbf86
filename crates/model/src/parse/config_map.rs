//! ConfigMaps: the mesh configuration and the networks of the mesh, which are YAML within a text, allocated addresses,
//! and root certificates.

use std::sync::Arc;

use serde::de::DeserializeOwned;
use skysail_yaml::{Node, Value, embedded};

use super::{
    Reading, Taken,
    decode::{Decoded, decode_proto, rename},
    field_error::{FieldError, InvalidField, path_text},
    lines::find_line,
};
use crate::{
    analysis::Code,
    api::{ConfigMap, MeshConfig, Object, Typed, kube, manifest, mesh_config, mesh_networks},
    diagnostic::Diagnostic,
    fields::{Support, mesh_setting},
    validate::{self, Findings},
};

/// Remedy for a mesh configuration in another place.
const MESH_CONFIG: &str = "the mesh configuration is key mesh of ConfigMap istio in namespace istio-system";

impl Reading {
    /// Reads a ConfigMap. The mesh configuration is YAML within a text. If the text is a literal block (`|`), its lines
    /// are those of the file.
    pub(super) fn config_map(&mut self, node: &Node) {
        let taken: Option<Taken<manifest::ConfigMapManifest>> = self.manifest(node, "ConfigMap");
        let Some(mut map) = taken.filter(Taken::is_whole).map(|taken| taken.value) else { return };
        let meta = kube::meta(map.metadata, true);
        let text = map.data.remove(mesh_config::KEY);
        let mut findings = Findings::default();
        let spec = match (meta.namespace.as_str(), meta.name.as_str()) {
            (mesh_config::NAMESPACE, mesh_config::NAME) => {
                if text.is_none() {
                    findings.add(
                        Code::MisplacedMeshConfig,
                        "data",
                        "has no key mesh, so the mesh has the default configuration",
                        "write the settings to key mesh",
                    );
                }
                let networks = map.data.get(mesh_networks::KEY).map_or("", String::as_str);
                let mesh =
                    self.embedded(node, &text.unwrap_or_default(), mesh_config::KEY, validate::mesh_config);
                let networks = self.embedded(node, networks, mesh_networks::KEY, validate::mesh_networks);
                let (Some(mut mesh), Some(networks)) = (mesh, networks) else { return };
                // Validation has named the tags that a proxy would refuse.
                mesh.default_config.tracing.iter_mut().for_each(|tracing| drop(tracing.remove_bad_tags()));
                ConfigMap::Mesh(Box::new(MeshConfig { networks, ..mesh }))
            }
            (mesh_config::NAMESPACE, mesh_config::ADDRESSES) => {
                ConfigMap::Addresses(validate::addresses(&map.data, &mut findings))
            }
            (namespace, name) => {
                if text.is_some() && (name == mesh_config::NAME || namespace == mesh_config::NAMESPACE) {
                    let message = "is not the mesh configuration, so it has no effect";
                    findings.add(Code::MisplacedMeshConfig, "data.mesh", message, MESH_CONFIG);
                }
                validate::root_map(&map.data)
            }
        };
        self.finish(node, Object::ConfigMap(Arc::new(Typed { meta, spec })), findings.done(), &[]);
    }

    /// Reads the text of a key of the mesh's ConfigMap, which is YAML. Returns `None` if it is refused.
    fn embedded<T>(
        &mut self,
        node: &Node,
        text: &str,
        key: &'static str,
        check: impl Fn(&T) -> Vec<validate::Finding>,
    ) -> Option<T>
    where
        T: Default + DeserializeOwned,
    {
        let value = node.get("data").and_then(|data| data.get(key));
        let (first, block) = match value {
            Some(Node { line, value: Value::Text(_, block) }) => (*line, *block),
            _ => (node.line, false),
        };
        let place = |line: u32| if block { first + line.saturating_sub(1) } else { first };
        let file = self.file.clone();
        let found = |code: Code, line: u32, field: &str, message: String, remedy: String| {
            let field = if field.is_empty() { format!("data.{key}") } else { format!("data.{key}.{field}") };
            Diagnostic::new(code, &file, place(line), message).field(field).remedy(remedy)
        };
        let Some(document) = embedded(text) else {
            return Some(T::default());
        };
        let root = match document.root {
            Ok(root) => root,
            Err(error) => {
                let remedy = "check indentation, quotes and colons".to_owned();
                self.report(found(Code::NotYaml, error.line, "", error.message, remedy), node);
                return None;
            }
        };
        let mut root = root;
        let mut decoded: Decoded<T> = decode_proto(&root);
        rename(&mut root, std::mem::take(&mut decoded.renamed));
        let invalid: Vec<InvalidField> = decoded.errors.iter().map(FieldError::invalid).collect();
        let mut refused = !invalid.is_empty();
        for error in decoded.errors {
            let field = path_text(&error.path);
            self.report(found(error.code, error.line, &field, error.message, error.remedy), node);
        }
        let unknown: Vec<String> = decoded.unknown.iter().map(|found| path_text(&found.path)).collect();
        for unknown in decoded.unknown {
            let field = path_text(&unknown.path);
            let camel = unknown.invalid().path;
            let listed = if key == mesh_config::KEY { mesh_setting(&camel) } else { None };
            let is_typo = listed.is_none() && unknown.remedy.starts_with("did you mean");
            refused |= is_typo;
            if is_typo {
                self.report(
                    found(Code::UnknownField, unknown.line, &field, unknown.message, unknown.remedy),
                    node,
                );
            } else if listed != Some(Support::Unread) {
                let message = "this setting is not supported and has no effect".to_owned();
                self.report(
                    found(Code::UnsupportedSetting, unknown.line, &field, message, String::new()),
                    node,
                );
            }
        }
        let mut findings: Vec<validate::Finding> = decoded.value.iter().flat_map(check).collect();
        if key == mesh_config::KEY {
            // Unknown settings are reported above.
            let marked = validate::unsupported_settings(&root, &findings);
            findings.extend(marked.into_iter().filter(|finding| !unknown.contains(&finding.field)));
        }
        findings.retain(|finding| !invalid.iter().any(|field| field.explains(finding)));
        for finding in findings {
            refused |= finding.is_error();
            let line = find_line(&root, &finding.field);
            let diagnostic = found(finding.code, line, &finding.field, finding.message, finding.remedy);
            self.report(diagnostic, node);
        }
        decoded.value.filter(|_| !refused)
    }
}
