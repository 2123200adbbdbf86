//! Volumes of pods, as written in the manifest.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

/// A volume of a pod. It has one source; without one it is an empty folder.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Volume {
    pub(crate) name: String,
    pub(crate) config_map: Option<Source>,
    pub(crate) secret: Option<Source>,
    #[serde(rename = "downwardAPI")]
    pub(crate) downward: Option<Downward>,
    pub(crate) projected: Option<Projected>,
    pub(crate) empty_dir: Option<EmptyDir>,
    pub(crate) persistent_volume_claim: Option<Claim>,
    pub(crate) host_path: Option<HostPath>,
    /// Sources that are not supported.
    #[serde(flatten)]
    pub(crate) other: BTreeMap<String, Value>,
}

/// Keys of a ConfigMap or a Secret as files.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Source {
    #[serde(alias = "secretName")]
    pub(crate) name: String,
    pub(crate) items: Vec<KeyToPath>,
    pub(crate) default_mode: Option<u32>,
    pub(crate) optional: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct KeyToPath {
    pub(crate) key: String,
    pub(crate) path: String,
    pub(crate) mode: Option<u32>,
}

/// Fields of the pod as files.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Downward {
    pub(crate) items: Vec<DownwardFile>,
    pub(crate) default_mode: Option<u32>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct DownwardFile {
    pub(crate) path: String,
    pub(crate) mode: Option<u32>,
    pub(crate) field_ref: Option<FieldRef>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct FieldRef {
    pub(crate) field_path: String,
}

/// Several sources in one folder.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Projected {
    pub(crate) sources: Vec<Projection>,
    pub(crate) default_mode: Option<u32>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Projection {
    pub(crate) config_map: Option<Source>,
    pub(crate) secret: Option<Source>,
    #[serde(rename = "downwardAPI")]
    pub(crate) downward: Option<Downward>,
    pub(crate) service_account_token: Option<TokenFile>,
    /// Sources that are not supported.
    #[serde(flatten)]
    pub(crate) other: BTreeMap<String, Value>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct TokenFile {
    pub(crate) audience: Option<String>,
    pub(crate) path: String,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct EmptyDir {
    pub(crate) size_limit: Value,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Claim {
    pub(crate) claim_name: String,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct HostPath {
    pub(crate) path: String,
}

/// Mount of a volume in a container.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct VolumeMount {
    pub(crate) name: String,
    pub(crate) mount_path: String,
    pub(crate) sub_path: String,
    pub(crate) read_only: bool,
    /// Fields that are not used; see [`crate::unsupported`].
    #[serde(flatten)]
    pub(crate) other: BTreeMap<String, Value>,
}
