//! Containers without images: the program of each container, and its environment.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use serde_json::Value;

use crate::{
    mounts::View,
    objects::{Container, Data, Objects, Values, Variable, repository},
    plan::Pod,
    ports::{self, Ports},
    process::{Program, Restart},
    unsupported, volumes,
};

/// Programs of images.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Images<'a> {
    /// Programs by image name, without tag, digest and the registry's default host.
    pub(crate) known: &'a BTreeMap<String, Vec<String>>,
    /// Program of all other images.
    pub(crate) stand_in: &'a [String],
    /// True if containers of other images run their own `command` on this machine.
    pub(crate) runs_commands: bool,
}

/// Folders of a pod.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PodFolders<'a> {
    pub(crate) folder: &'a Path,
    pub(crate) logs: &'a Path,
}

/// Purpose of a container, which determines its stand-in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// It serves as long as the pod lives.
    Serves,
    /// It completes its work and ends, such as an init container or one of a Job.
    Ends,
}

/// Returns the program of a container, and notes for the user.
pub(crate) fn program(
    container: &Container,
    pod: &Pod,
    ports: &Ports,
    objects: &Objects,
    images: Images<'_>,
    (role, restart): (Role, Restart),
    folders: PodFolders<'_>,
) -> (Program, Vec<String>) {
    let mut notes = Vec::new();
    let mut note = |text: String| notes.push(format!("container {}: {text}", container.name));
    let mut environment = environment(container, pod, objects, &mut note);
    let command = if let Some(program) = find(images, &container.image) {
        if !container.command.is_empty() {
            note("`command` has no effect: the program of --image runs instead".to_owned());
        }
        unsupported::of_container(container, pod).into_iter().for_each(&mut note);
        let args = container.args.iter().map(|argument| expand(argument, &environment));
        program.iter().cloned().chain(args).collect()
    } else if images.runs_commands && !container.command.is_empty() {
        unsupported::of_container(container, pod).into_iter().for_each(&mut note);
        let words = container.command.iter().chain(&container.args);
        words.map(|word| expand(word, &environment)).collect()
    } else if role == Role::Ends {
        note(format!(
            "no program for image {}: it is not run and counts as completed{}",
            container.image,
            hint(container)
        ));
        images.stand_in.iter().cloned().chain(["--done".to_owned()]).collect()
    } else {
        note(stand_in_note(container, ports));
        let identity = [
            ("SKYSAIL_ECHO_POD", pod.name.clone()),
            ("SKYSAIL_ECHO_NAMESPACE", pod.namespace.clone()),
            ("SKYSAIL_ECHO_IP", pod.address.to_string()),
            ("SKYSAIL_ECHO_VERSION", pod.labels.get("version").cloned().unwrap_or_default()),
        ];
        environment.extend(identity.map(|(name, value)| (name.to_owned(), value)));
        let listen = ports.tcp.iter().map(|(port, protocol)| ports::argument(*port, *protocol));
        let listen = listen.flat_map(|port| ["--port".to_owned(), port]);
        images.stand_in.iter().cloned().chain(listen).collect()
    };
    let view = match is_stand_in(images, container) {
        true => View::default(),
        false => view(container, pod, folders.folder, &mut note),
    };
    let log = folders.logs.join(format!("{}.log", container.name));
    let name = container.name.clone();
    (Program { name, command, environment, log, restart, view: Arc::new(view) }, notes)
}

/// Returns the files that a container's program sees.
fn view(container: &Container, pod: &Pod, folder: &Path, note: &mut impl FnMut(String)) -> View {
    let mounts = volumes::mounts(container, pod, folder);
    let working_dir = container.working_dir.as_ref().map(PathBuf::from).filter(|dir| {
        let is_there = dir.is_absolute() && dir.is_dir() || mounts.iter().any(|mount| dir.starts_with(&mount.target));
        if !is_there && !dir.as_os_str().is_empty() {
            note(format!(
                "workingDir has no effect: this machine has no folder {}; the program starts in the working directory of `skysail up`",
                dir.display()
            ));
        }
        is_there
    });
    View::new(mounts, working_dir, folder.join(format!("root-{}", container.name)))
}

/// Returns the note about the stand-in of a container.
fn stand_in_note(container: &Container, ports: &Ports) -> String {
    let image = &container.image;
    let what = match ports.tcp.is_empty() {
        true => "an idle process".to_owned(),
        false => format!("an echo server {ports}"),
    };
    let udp = match ports.udp.is_empty() {
        true => String::new(),
        false => {
            let numbers: Vec<_> = ports.udp.iter().map(u16::to_string).collect();
            format!("; nothing answers on UDP ({})", numbers.join(", "))
        }
    };
    format!("no program for image {image}: {what} runs in its place{udp}{}", hint(container))
}

/// Returns a hint how to run the container's own command.
fn hint(container: &Container) -> &'static str {
    if container.command.is_empty() { "" } else { " (--run-commands runs its `command` on this machine)" }
}

/// Returns whether a stand-in runs for the container.
pub(crate) fn is_stand_in(images: Images<'_>, container: &Container) -> bool {
    find(images, &container.image).is_none() && (!images.runs_commands || container.command.is_empty())
}

fn find<'a>(images: Images<'a>, image: &str) -> Option<&'a Vec<String>> {
    images.known.get(image).or_else(|| images.known.get(repository(image)))
}

fn environment(
    container: &Container,
    pod: &Pod,
    objects: &Objects,
    note: &mut impl FnMut(String),
) -> BTreeMap<String, String> {
    let mut environment = BTreeMap::from([("HOSTNAME".to_owned(), pod.name.clone())]);
    for source in &container.env_from {
        match texts(source, "Ref", pod, objects) {
            Err(_) if is_optional(source, "Ref") => {}
            Ok((_, texts)) => {
                let prefix = source["prefix"].as_str().unwrap_or_default();
                environment
                    .extend(texts.iter().map(|(name, value)| (format!("{prefix}{name}"), text(value))));
            }
            Err(problem) => note(format!("envFrom: {problem}")),
        }
    }
    for variable in &container.env {
        match value(variable, pod, objects) {
            Ok(value) => {
                let value = expand(&value, &environment);
                environment.insert(variable.name.clone(), value);
            }
            Err(_) if variable.value_from.as_ref().is_some_and(|source| is_optional(source, "KeyRef")) => {}
            Err(problem) => note(format!("env {}: {problem}; the variable is not set", variable.name)),
        }
    }
    environment
}

fn value(variable: &Variable, pod: &Pod, objects: &Objects) -> Result<String, String> {
    let Some(source) = &variable.value_from else { return Ok(variable.value.clone().unwrap_or_default()) };
    if let Some(path) = source["fieldRef"]["fieldPath"].as_str() {
        return pod.field(path).ok_or_else(|| format!("fieldPath {path} is not supported"));
    }
    let (reference, texts) = texts(source, "KeyRef", pod, objects)?;
    let key = reference["key"].as_str().unwrap_or_default();
    texts.get(key).map(|value| text(value)).ok_or_else(|| format!("no key {key} in {}", reference["name"]))
}

fn text(value: &[u8]) -> String {
    String::from_utf8_lossy(value).into_owned()
}

/// Returns whether the object of a reference may be missing.
fn is_optional(source: &Value, suffix: &str) -> bool {
    FIELDS.iter().any(|(_, field)| source[format!("{field}{suffix}")]["optional"] == true)
}

/// Kinds that variables refer to, with the start of the field's name.
const FIELDS: [(&str, &str); 2] = [("ConfigMap", "configMap"), ("Secret", "secret")];

/// Returns the reference, and the ConfigMap or Secret that it names.
fn texts<'a>(
    source: &'a Value,
    suffix: &str,
    pod: &Pod,
    objects: &'a Objects,
) -> Result<(&'a Value, &'a Data), String> {
    for (kind, field) in FIELDS {
        let reference = &source[format!("{field}{suffix}")];
        if let Some(name) = reference["name"].as_str() {
            let key = (kind.to_owned(), pod.namespace.clone(), name.to_owned());
            let found = objects.values.get(&key).map(|Values { data, .. }| (reference, data));
            return found.ok_or_else(|| format!("{kind} {}/{name} does not exist", pod.namespace));
        }
    }
    let kinds: Vec<_> = source.as_object().into_iter().flat_map(|source| source.keys()).cloned().collect();
    Err(format!("{} is not supported", kinds.join(", ")))
}

/// Replaces `$(NAME)` by the variable's value, as Kubernetes does; `$$(` is an escaped `$(`.
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
    use crate::objects::Workload;
    use serde_json::json;
    use skysail_model::api::Protocol;

    #[test]
    fn environments_are_built_from_values_fields_config_maps_and_secrets() {
        let container: Container = serde_json::from_value(json!({
            "name": "c", "image": "i",
            "envFrom": [
                { "prefix": "P_", "configMapRef": { "name": "m" } },
                { "secretRef": { "name": "s" } },
                { "secretRef": { "name": "t", "optional": true } },
            ],
            "env": [
                { "name": "A", "value": "a" }, { "name": "B", "value": "$(A)-b" },
                { "name": "IP", "valueFrom": { "fieldRef": { "fieldPath": "status.podIP" } } },
                { "name": "KEY", "valueFrom": { "secretKeyRef": { "name": "s", "key": "k" } } },
                { "name": "NONE", "valueFrom": { "secretKeyRef": { "name": "t", "key": "k" } } },
                { "name": "MAYBE", "valueFrom": { "secretKeyRef": { "name": "t", "key": "k", "optional": true } } },
            ],
        }))
        .unwrap();
        let text = |key: &str, value: &str| Values {
            data: Data::from([(key.to_owned(), value.as_bytes().to_vec())]),
            ..Values::default()
        };
        let key = |kind: &str, name: &str| (kind.to_owned(), "n".to_owned(), name.to_owned());
        let values = [(key("ConfigMap", "m"), text("x", "1")), (key("Secret", "s"), text("k", "v"))].into();
        let objects = Objects { values, ..Objects::default() };
        let workload = Workload {
            kind: "Pod".to_owned(),
            namespace: "n".to_owned(),
            name: "p".to_owned(),
            account: "default".to_owned(),
            replicas: 1,
            parallelism: 1,
            backoff_limit: 6,
            claims: Vec::new(),
            template: Default::default(),
            hash: String::new(),
        };
        let pod = Pod::new(&workload, "p".to_owned(), [10, 244, 0, 2].into(), &BTreeMap::new());
        let mut notes = Vec::new();
        let environment = environment(&container, &pod, &objects, &mut |note| notes.push(note));
        let expected = [
            ("A", "a"),
            ("B", "a-b"),
            ("HOSTNAME", "p"),
            ("IP", "10.244.0.2"),
            ("KEY", "v"),
            ("P_x", "1"),
            ("k", "v"),
        ];
        assert_eq!(environment, expected.map(|(name, value)| (name.to_owned(), value.to_owned())).into());
        assert_eq!(notes, ["env NONE: Secret n/t does not exist; the variable is not set"]);
    }

    #[test]
    fn a_note_names_the_ports_and_protocols_of_a_stand_in() {
        let container = Container { image: "acme/x".to_owned(), ..Container::default() };
        let note = |ports: Ports| stand_in_note(&container, &ports);
        assert_eq!(note(Ports::default()), "no program for image acme/x: an idle process runs in its place");
        let ports = Ports {
            tcp: [(80, Protocol::Http), (81, Protocol::Grpc)].into(),
            udp: [53, 54].into(),
            is_default: false,
        };
        assert_eq!(
            note(ports),
            "no program for image acme/x: an echo server on ports 80 (HTTP), 81 (gRPC) runs in its place; nothing answers \
             on UDP (53, 54)"
        );
    }

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
