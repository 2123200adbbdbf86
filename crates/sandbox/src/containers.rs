//! Containers without images: which program runs for a container, and with what environment.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use crate::{
    objects::{Container, Variable},
    plan::Pod,
    process::Program,
};

/// Which programs stand for which images.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Images<'a> {
    /// By image name, without tag, digest and registry's default host.
    pub(crate) known: &'a BTreeMap<String, Vec<String>>,
    /// What stands in for all others.
    pub(crate) stand_in: &'a [String],
}

/// The program for a container, and what users should know about it.
pub(crate) fn program(
    container: &Container,
    pod: &Pod,
    ports: &BTreeSet<u16>,
    images: Images<'_>,
    logs: &Path,
) -> (Program, Vec<String>) {
    let mut notes = Vec::new();
    let mut note = |text: String| {
        notes.push(format!(
            "{} {}/{}: container {}: {text}",
            pod.kind, pod.namespace, pod.workload, container.name
        ));
    };
    let mut environment = environment(container, pod, &mut note);
    let command = if let Some(program) = find(images, &container.image) {
        if !container.command.is_empty() {
            note("`command` has no effect: the program that stands for the image is run".to_owned());
        }
        let args = container.args.iter().map(|argument| expand(argument, &environment));
        program.iter().cloned().chain(args).collect()
    } else {
        let what = if ports.is_empty() { "an idle process" } else { "an echo server" };
        note(format!("image {} is not known here: {what} stands in", container.image));
        let identity = [
            ("SKYSAIL_ECHO_POD", pod.name.clone()),
            ("SKYSAIL_ECHO_NAMESPACE", pod.namespace.clone()),
            ("SKYSAIL_ECHO_IP", pod.address.to_string()),
            ("SKYSAIL_ECHO_VERSION", pod.labels.get("version").cloned().unwrap_or_default()),
        ];
        environment.extend(identity.map(|(name, value)| (name.to_owned(), value)));
        let listen = ports.iter().flat_map(|port| ["--port".to_owned(), port.to_string()]);
        images.stand_in.iter().cloned().chain(listen).collect()
    };
    let log = logs.join(format!("{}.log", container.name));
    (Program { name: container.name.clone(), command, environment, log }, notes)
}

/// Whether a program stands for the image.
pub(crate) fn is_known(images: Images<'_>, image: &str) -> bool {
    find(images, image).is_some()
}

fn find<'a>(images: Images<'a>, image: &str) -> Option<&'a Vec<String>> {
    images.known.get(image).or_else(|| images.known.get(repository(image)))
}

/// An image's name without tag and digest.
fn repository(image: &str) -> &str {
    let image = image.split('@').next().unwrap_or(image);
    match image.rsplit_once(':') {
        // A colon before a slash belongs to the registry's port.
        Some((name, tag)) if !tag.contains('/') => name,
        _ => image,
    }
}

fn environment(container: &Container, pod: &Pod, note: &mut impl FnMut(String)) -> BTreeMap<String, String> {
    let mut environment = BTreeMap::from([("HOSTNAME".to_owned(), pod.name.clone())]);
    if !container.env_from.is_empty() {
        note("`envFrom` is not supported here: its variables are not set".to_owned());
    }
    for variable in &container.env {
        match value(variable, pod) {
            Ok(value) => {
                let value = expand(&value, &environment);
                environment.insert(variable.name.clone(), value);
            }
            Err(problem) => note(format!("env {}: {problem}: it is not set", variable.name)),
        }
    }
    environment
}

fn value(variable: &Variable, pod: &Pod) -> Result<String, String> {
    let Some(source) = &variable.value_from else { return Ok(variable.value.clone().unwrap_or_default()) };
    let Some(path) = source["fieldRef"]["fieldPath"].as_str() else {
        let kinds: Vec<_> =
            source.as_object().into_iter().flat_map(|source| source.keys()).cloned().collect();
        return Err(format!("{} is not supported here", kinds.join(", ")));
    };
    pod.field(path).ok_or_else(|| format!("fieldPath {path} is not supported here"))
}

/// Replaces `$(NAME)` by the variable's value, as Kubernetes does; `$$(` stands for `$(`.
fn expand(text: &str, environment: &BTreeMap<String, String>) -> String {
    let (mut out, mut rest) = (String::new(), text);
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let variable = rest.strip_prefix("$(").and_then(|name| name.split_once(')'));
        if let Some(after) = rest.strip_prefix("$$") {
            out.push('$');
            rest = after;
        } else if let Some((value, after)) =
            variable.and_then(|(name, after)| Some((environment.get(name)?, after)))
        {
            out.push_str(value);
            rest = after;
        } else {
            out.push('$');
            rest = &rest[1..];
        }
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_replaced_and_images_lose_their_tags() {
        let environment = BTreeMap::from([("A".to_owned(), "x".to_owned())]);
        assert_eq!(expand("-$(A)-$(B)-$$(A)-$", &environment), "-x-$(B)-$(A)-$");
        for (image, name) in [
            ("skysail/airline:1.0", "skysail/airline"),
            ("host:5000/a", "host:5000/a"),
            ("host:5000/a:1@sha256:00", "host:5000/a"),
        ] {
            assert_eq!(repository(image), name);
        }
    }
}
