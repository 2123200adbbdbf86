//! Validation of volumes: the sources of their files, and their mounts in containers.

use std::{
    collections::BTreeSet,
    path::{Component, Path},
};

use super::{Code, Findings, is_label_text};
use crate::api::manifest::{Projection, Volume, VolumeItem, VolumeMount, VolumeSource};

/// Remedy for a path that must stay in its folder.
const RELATIVE: &str = "use a relative path without \"..\"";

/// Checks the volumes of a pod.
pub(super) fn sources(volumes: &[Volume], at: &str, findings: &mut Findings) {
    for (index, volume) in volumes.iter().enumerate() {
        let at = format!("{at}[{index}]");
        if !is_label_text(&volume.name, false) {
            let message = format!("{:?} is not a valid volume name", volume.name);
            findings.add(
                Code::InvalidName,
                format!("{at}.name"),
                message,
                "use lower-case letters, digits and '-'",
            );
        }
        let Volume {
            config_map,
            secret,
            downward,
            projected,
            empty_dir,
            host_path,
            persistent_volume_claim,
            ..
        } = volume;
        let others = [empty_dir, host_path, persistent_volume_claim].map(Option::is_some);
        let files = [config_map, secret, downward, projected].map(Option::is_some);
        if others.iter().chain(&files).filter(|is_set| **is_set).count() > 1 {
            findings.add(
                Code::ExclusiveFields,
                &at,
                "has more than one source",
                "set exactly one, such as configMap or emptyDir",
            );
        }
        named(config_map.as_ref(), |one| &one.name, &format!("{at}.configMap.name"), findings);
        named(secret.as_ref(), |one| &one.secret_name, &format!("{at}.secret.secretName"), findings);
        for (field, found) in [
            ("configMap", config_map),
            ("secret", secret),
            ("downwardAPI", downward),
            ("projected", projected),
        ] {
            if let Some(found) = found {
                source(found, &format!("{at}.{field}"), findings);
            }
        }
    }
}

fn named(
    source: Option<&VolumeSource>,
    name: impl Fn(&VolumeSource) -> &Option<String>,
    field: &str,
    findings: &mut Findings,
) {
    if source.is_some_and(|source| name(source).as_deref().unwrap_or_default().is_empty()) {
        findings.add(Code::MissingField, field, "is missing", "name the object whose keys are to be files");
    }
}

fn source(source: &VolumeSource, at: &str, findings: &mut Findings) {
    mode(source.default_mode, &format!("{at}.defaultMode"), findings);
    items(&source.items, at, findings);
    for (index, projection) in source.sources.iter().enumerate() {
        let at = format!("{at}.sources[{index}]");
        let Projection { config_map, downward, secret, service_account_token } = projection;
        named(config_map.as_ref(), |one| &one.name, &format!("{at}.configMap.name"), findings);
        named(secret.as_ref(), |one| &one.name, &format!("{at}.secret.name"), findings);
        for (field, found) in [("configMap", config_map), ("secret", secret), ("downwardAPI", downward)] {
            if let Some(found) = found {
                items(&found.items, &format!("{at}.{field}"), findings);
            }
        }
        if let Some(token) = service_account_token {
            file(token, &format!("{at}.serviceAccountToken"), findings);
        }
    }
}

fn items(items: &[VolumeItem], at: &str, findings: &mut Findings) {
    for (index, item) in items.iter().enumerate() {
        file(item, &format!("{at}.items[{index}]"), findings);
    }
}

fn file(item: &VolumeItem, at: &str, findings: &mut Findings) {
    mode(item.mode, &format!("{at}.mode"), findings);
    let field = format!("{at}.path");
    if item.path.is_empty() {
        findings.add(Code::MissingField, field, "is missing", "add the path of the file in the volume");
    } else if !stays_in_folder(&item.path) {
        findings.add(Code::InvalidPath, field, format!("{:?} leads out of the volume", item.path), RELATIVE);
    } else if item.path.starts_with("..") {
        let message = format!("{:?} begins with \"..\", which is reserved", item.path);
        findings.add(Code::InvalidPath, field, message, "use a different name");
    }
}

/// Checks the permissions of a file.
fn mode(mode: Option<i64>, field: &str, findings: &mut Findings) {
    if let Some(mode) = mode.filter(|mode| !(0..=0o777).contains(mode)) {
        let message = format!("{mode} is not a file mode: modes go from 0 to 511, which is 0777 in octal");
        findings.add(Code::InvalidValue, field, message, "write it in octal with a leading 0, such as 0400");
    }
}

/// Checks the volume mounts of a container.
pub(super) fn mounts(mounts: &[VolumeMount], at: &str, findings: &mut Findings) {
    let mut known = BTreeSet::new();
    for (index, mount) in mounts.iter().enumerate() {
        let at = format!("{at}[{index}]");
        let field = format!("{at}.mountPath");
        let path = Path::new(&mount.mount_path);
        let is_plain = |part: Component<'_>| matches!(part, Component::RootDir | Component::Normal(_));
        if mount.mount_path.is_empty() {
            findings.add(
                Code::MissingField,
                field,
                "is missing",
                "add the path at which the container finds the volume",
            );
        } else if !path.is_absolute() || !path.components().all(is_plain) || mount.mount_path.contains(':') {
            let message = format!("{:?} is not a path to mount at", mount.mount_path);
            findings.add(Code::InvalidPath, field, message, "use an absolute path without \"..\" and ':'");
        } else if path.parent().is_none() || path.starts_with("/proc") {
            let message = format!("nothing can be mounted at {:?}", mount.mount_path);
            findings.add(Code::InvalidPath, field, message, "use a folder of its own, such as /data");
        } else if !known.insert(path.components().as_path()) {
            let message = format!("{:?} is the path of another mount of the container", mount.mount_path);
            findings.add(Code::DuplicateName, field, message, "use a different path for each mount");
        }
        let paths = [("subPath", &mount.sub_path), ("subPathExpr", &mount.sub_path_expr)];
        for (name, path) in paths {
            if let Some(path) = path.as_deref().filter(|path| !path.is_empty() && !stays_in_folder(path)) {
                let message = format!("{path:?} leads out of the volume");
                findings.add(Code::InvalidPath, format!("{at}.{name}"), message, RELATIVE);
            }
        }
        if paths.iter().all(|(_, path)| path.as_deref().is_some_and(|path| !path.is_empty())) {
            findings.add(
                Code::ExclusiveFields,
                &at,
                "has both subPath and subPathExpr",
                "remove one of them",
            );
        }
    }
}

/// Returns whether a path stays in its folder.
fn stays_in_folder(path: &str) -> bool {
    let is_part = |part: Component<'_>| matches!(part, Component::Normal(_) | Component::CurDir);
    !path.is_empty() && Path::new(path).components().all(is_part)
}
