//! Files of other tools beside the objects, and texts that are not objects: what they are, and remedies.

use skysail_yaml::Node;

use super::kinds::KUSTOMIZE;

/// Returns the remedy for a text that is not YAML, if a more specific one is known. `line` is the line of the error.
pub(super) fn of_text(text: &str, line: u32) -> Option<&'static str> {
    if text.contains("{{") {
        return Some("this looks like a Helm template; use the output of `helm template`");
    }
    if text.chars().any(|c| c.is_control() && !matches!(c, '\n' | '\r' | '\t')) {
        return Some("this is not a text file; move it out of the folder");
    }
    let before = usize::try_from(line).unwrap_or_default().saturating_sub(2);
    let near = || text.lines().skip(before).take(2).map(str::trim);
    if near().any(|line| line.starts_with("```")) {
        return Some("remove the lines that begin with ```");
    }
    let is_separator = |line: &str| line.len() >= 2 && line.bytes().all(|byte| byte == b'-');
    near().any(is_separator).then_some("separate objects by a line of exactly ---, without indentation")
}

/// Returns what a mapping without `apiVersion` or `kind` is, and the remedy.
pub(super) fn of_mapping(root: &Node) -> (&'static str, &'static str) {
    let has = |field: &str| root.get(field).is_some();
    if has("resources") || has("patches") || has("namePrefix") || has("configMapGenerator") {
        return ("this looks like a kustomization, which is not built", KUSTOMIZE);
    }
    if root.get("apiVersion").and_then(Node::text).is_some_and(|version| matches!(version, "v1" | "v2"))
        && has("version")
        && has("name")
    {
        return ("this looks like a Helm chart, which is not rendered", "use the output of `helm template`");
    }
    if has("services") {
        return ("this looks like a Compose file", "write Deployments and Services");
    }
    match (has("apiVersion"), has("kind")) {
        (true, _) => ("kind is missing", "add kind"),
        (_, true) => ("apiVersion is missing", "add apiVersion"),
        _ => (
            "not a Kubernetes object: apiVersion and kind are missing",
            "add them, or move the file out of the folder",
        ),
    }
}
