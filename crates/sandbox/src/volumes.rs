//! Volumes of pods: their kinds and their files, computed from the objects. Pure; [`store`] writes the files, and
//! [`crate::mounts`] mounts them in containers.

pub(crate) mod store;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use serde_json::Value;

use crate::{
    mounts::Mount,
    objects::{
        Container, Downward, KeyToPath, Objects, Projection, Source, TokenFile, Values, Volume, VolumeMount,
    },
    plan::Pod,
};

/// Kind of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum VolumeKind {
    /// Files from objects; they change with the objects.
    Files,
    /// An empty folder in memory that ends with the pod, with a size limit in bytes.
    Memory(u64),
    /// An empty folder that outlives the pod; the name of its claim.
    Claim(String),
}

/// Mode and content of a file.
pub(crate) type VolumeFile = (u32, FileContent);

/// Content of a file in a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FileContent {
    Bytes(Vec<u8>),
    /// Service account token for an audience.
    Token(String),
}

/// Files of a volume by their paths, or the object that it lacks.
pub(crate) type VolumeFiles = Result<BTreeMap<PathBuf, VolumeFile>, String>;

/// Files of a pod's volumes, by the volumes' names.
pub(crate) type Contents = BTreeMap<String, VolumeFiles>;

/// Default size limit of a folder in memory, in bytes.
pub(crate) const DEFAULT_SIZE: u64 = 1 << 30;
/// Default mode of files. Source: Kubernetes' `defaultMode`.
const MODE: u32 = 0o644;
/// Default audience of tokens: the API server.
const API_SERVER: &str = "https://kubernetes.default.svc.cluster.local";

impl Volume {
    /// Returns the kind of the volume; `None` if it is not supported.
    pub(crate) fn kind(&self) -> Option<VolumeKind> {
        if self.config_map.is_some()
            || self.secret.is_some()
            || self.downward.is_some()
            || self.projected.is_some()
        {
            return Some(VolumeKind::Files);
        }
        if let Some(claim) = &self.persistent_volume_claim {
            return Some(VolumeKind::Claim(claim.claim_name.clone()));
        }
        if self.host_path.is_some() || !self.other.is_empty() {
            return None;
        }
        let limit = self.empty_dir.as_ref().and_then(|source| quantity(&source.size_limit));
        Some(VolumeKind::Memory(limit.filter(|limit| *limit > 0).unwrap_or(DEFAULT_SIZE)))
    }
}

/// Returns the supported volumes that a container mounts, in the order of its mounts.
pub(crate) fn mounted<'a>(
    container: &'a Container,
    pod: &'a Pod,
) -> impl Iterator<Item = (usize, &'a Volume, &'a VolumeMount)> {
    let supported = |mount: &&VolumeMount| !mount.other.contains_key("subPathExpr");
    container.volume_mounts.iter().filter(supported).filter_map(|mount| {
        let number = pod.spec.volumes.iter().position(|volume| volume.name == mount.name)?;
        let volume = pod.spec.volumes.get(number)?;
        volume.kind().map(|_| (number, volume, mount))
    })
}

/// Returns the path of the volume with this number, in the pod's folder.
pub(crate) fn folder(pod: &Path, number: usize) -> PathBuf {
    pod.join("volumes").join(number.to_string())
}

/// Returns the mounts of a container.
pub(crate) fn mounts(container: &Container, pod: &Pod, pod_folder: &Path) -> Vec<Mount> {
    let mounts = mounted(container, pod).map(|(number, volume, mount)| {
        let holds_files = volume.kind() == Some(VolumeKind::Files);
        Mount {
            volume: volume.name.clone(),
            source: folder(pod_folder, number),
            sub_path: mount.sub_path.clone().into(),
            makes: !holds_files,
            target: mount.mount_path.clone().into(),
            read_only: mount.read_only || holds_files,
        }
    });
    mounts.collect()
}

/// Returns the files of these volumes of a pod.
pub(crate) fn contents(pod: &Pod, names: &BTreeSet<String>, objects: &Objects) -> Contents {
    let volumes = pod.spec.volumes.iter().filter(|volume| names.contains(&volume.name));
    let filled = volumes.filter(|volume| volume.kind() == Some(VolumeKind::Files));
    filled.map(|volume| (volume.name.clone(), files(volume, pod, objects))).collect()
}

fn files(volume: &Volume, pod: &Pod, objects: &Objects) -> VolumeFiles {
    let mut files = BTreeMap::new();
    if let Some(source) = &volume.config_map {
        files.extend(keys("ConfigMap", source, None, pod, objects)?);
    }
    if let Some(source) = &volume.secret {
        files.extend(keys("Secret", source, None, pod, objects)?);
    }
    if let Some(source) = &volume.downward {
        files.extend(fields(source, None, pod));
    }
    if let Some(projected) = &volume.projected {
        let mode = projected.default_mode;
        for Projection { config_map, secret, downward, service_account_token, .. } in &projected.sources {
            if let Some(source) = config_map {
                files.extend(keys("ConfigMap", source, mode, pod, objects)?);
            }
            if let Some(source) = secret {
                files.extend(keys("Secret", source, mode, pod, objects)?);
            }
            if let Some(source) = downward {
                files.extend(fields(source, mode, pod));
            }
            if let Some(TokenFile { audience, path }) = service_account_token {
                let audience = audience.clone().filter(|audience| !audience.is_empty());
                let token = FileContent::Token(audience.unwrap_or_else(|| API_SERVER.to_owned()));
                files.extend(path_of(path).map(|path| (path, (mode.unwrap_or(MODE) & 0o777, token))));
            }
        }
    }
    Ok(files)
}

/// Returns the keys of a ConfigMap or a Secret as files.
fn keys(kind: &str, source: &Source, mode: Option<u32>, pod: &Pod, objects: &Objects) -> VolumeFiles {
    let Source { name, items, default_mode, optional } = source;
    let key = (kind.to_owned(), pod.namespace.clone(), name.clone());
    let about = format!("{kind} {}/{name}", pod.namespace);
    let Some(Values { data, binary }) = objects.values.get(&key) else {
        return if *optional { Ok(BTreeMap::new()) } else { Err(format!("{about} does not exist")) };
    };
    let mode = default_mode.or(mode).unwrap_or(MODE);
    let found = |key: &String| data.get(key).or_else(|| binary.get(key)).cloned();
    let entry = |mode: u32, bytes| (mode & 0o777, FileContent::Bytes(bytes));
    if items.is_empty() {
        let all = data.iter().chain(binary);
        return Ok(all.map(|(key, bytes)| (key.into(), entry(mode, bytes.clone()))).collect());
    }
    let mut files = BTreeMap::new();
    for KeyToPath { key, path, mode: own } in items {
        match (found(key), path_of(path)) {
            (Some(bytes), Some(path)) => _ = files.insert(path, entry(own.unwrap_or(mode), bytes)),
            (None, _) if !optional => return Err(format!("{about} has no key {key}")),
            _ => {}
        }
    }
    Ok(files)
}

/// Returns fields of the pod as files. Fields that are not supported have no file; [`crate::unsupported`] reports them.
fn fields(source: &Downward, mode: Option<u32>, pod: &Pod) -> BTreeMap<PathBuf, VolumeFile> {
    let mode = source.default_mode.or(mode).unwrap_or(MODE);
    let files = source.items.iter().filter_map(|item| {
        let field = &item.field_ref.as_ref()?.field_path;
        let text = match field.as_str() {
            "metadata.labels" => list(&pod.labels),
            "metadata.annotations" => list(&pod.annotations),
            field => pod.field(field)?,
        };
        let entry = (item.mode.unwrap_or(mode) & 0o777, FileContent::Bytes(text.into_bytes()));
        path_of(&item.path).map(|path| (path, entry))
    });
    files.collect()
}

/// Formats labels or annotations as the kubelet does.
fn list(labels: &BTreeMap<String, String>) -> String {
    let lines: Vec<_> = labels.iter().map(|(key, value)| format!("{key}={value:?}")).collect();
    lines.join("\n")
}

/// Returns a path inside a volume; `None` if it leaves the volume or begins with `..`, as the store's own names do. The
/// model refuses such paths.
pub(crate) fn path_of(path: &str) -> Option<PathBuf> {
    let is_name = |part: std::path::Component<'_>| matches!(part, std::path::Component::Normal(_));
    let is_good = !path.is_empty() && !path.starts_with("..") && Path::new(path).components().all(is_name);
    is_good.then(|| PathBuf::from(path))
}

/// Parses a Kubernetes quantity, rounded up to whole units.
fn quantity(value: &Value) -> Option<u64> {
    const UNITS: [(&str, f64); 12] = [
        ("Ki", 1024.0),
        ("Mi", 1_048_576.0),
        ("Gi", 1_073_741_824.0),
        ("Ti", 1_099_511_627_776.0),
        ("k", 1e3),
        ("M", 1e6),
        ("G", 1e9),
        ("T", 1e12),
        ("m", 1e-3),
        ("Pi", 1_125_899_906_842_624.0),
        ("P", 1e15),
        ("", 1.0),
    ];
    let text = match value {
        Value::Number(number) => number.to_string(),
        Value::String(text) => text.clone(),
        _ => return None,
    };
    let number = UNITS.iter().find_map(|(unit, factor)| {
        let number: f64 = text.strip_suffix(unit)?.parse().ok()?;
        Some(number * factor)
    })?;
    // Casts of floats saturate.
    number.is_finite().then_some(number.ceil() as u64)
}

#[cfg(test)]
mod tests;
