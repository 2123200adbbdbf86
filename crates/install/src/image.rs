//! Container images in the OCI format, made without a container engine.
//!
//! An image has one layer: the program, the libraries that it loads and a few files that they read. The archive is an OCI
//! image layout; `manifest.json` is for `docker load`. The same files give the same bytes: entries are sorted, times are
//! zero, and all files belong to root.

mod archive;
mod libraries;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use serde_json::{Value, json};

use self::archive::{Blob, gzip, sha256, tar};

/// Folder of programs in an image.
const PROGRAMS: &str = "usr/local/bin";
/// The sidecar, and its user and group. Interception excludes the connections of this user.
const SIDECAR: &str = "skysail-proxy";
const SIDECAR_USER: u32 = 1337;
/// User and group of the other programs.
const USER: u32 = 65_532;
/// File with the certificates of public authorities, in an image.
const AUTHORITIES: &str = "etc/ssl/certs/ca-certificates.crt";
/// The same file on machines, in the order of preference.
const MACHINE_AUTHORITIES: [&str; 3] =
    ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem"];
/// Time of creation. A real one would make each build different.
const CREATED: &str = "1970-01-01T00:00:00Z";

/// What an image is made of.
#[derive(Clone, Debug)]
pub struct ImageSpec {
    /// Program on this machine. Its file name is also that in the image.
    pub program: PathBuf,
    /// Name of the image, with a tag.
    pub name: String,
    /// Sentence about the program, for a label.
    pub description: String,
    /// Version of the program, for a label.
    pub version: String,
}

/// A file or folder of the layer.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    /// Permissions.
    mode: u32,
    /// Content; `None` for a folder.
    content: Option<Vec<u8>>,
}

/// Entries by path, without a leading slash.
type Entries = BTreeMap<String, Entry>;

/// An image.
#[derive(Clone, Debug)]
pub struct Image {
    /// Archive in the form of an OCI image layout.
    pub archive: Vec<u8>,
    /// Digest of the manifest, by which registries name the image.
    pub digest: String,
    /// Length of the program in bytes.
    pub program_length: usize,
    /// Paths of the files in the layer.
    pub files: Vec<String>,
}

impl Image {
    /// Makes an image of a program on this machine.
    ///
    /// # Errors
    /// The program or a library cannot be read, or is not for Linux.
    pub fn new(spec: &ImageSpec) -> anyhow::Result<Self> {
        let file = &spec.program;
        let program = fs::read(file).with_context(|| file.display().to_string())?;
        let program_length = program.len();
        let name = file.file_name().and_then(|name| name.to_str()).context("the program has no name")?;
        let path = format!("{PROGRAMS}/{name}");
        let (architecture, libraries) = libraries::needed(file, &program)?;
        let mut entries = common_entries();
        for (path, library) in libraries {
            let content = fs::read(&library).with_context(|| library.display().to_string())?;
            add(&mut entries, &path, 0o755, content);
        }
        add(&mut entries, &path, 0o755, program);
        if let Some(certificates) = MACHINE_AUTHORITIES.iter().find_map(|file| fs::read(file).ok()) {
            add(&mut entries, AUTHORITIES, 0o644, certificates);
        }
        let is_file = |(path, entry): (&String, &Entry)| entry.content.is_some().then(|| path.clone());
        let files = entries.iter().filter_map(is_file).collect();
        let labels = json!({
            "org.opencontainers.image.title": name,
            "org.opencontainers.image.description": spec.description,
            "org.opencontainers.image.version": spec.version,
            "org.opencontainers.image.source": env!("CARGO_PKG_REPOSITORY"),
            "org.opencontainers.image.licenses": env!("CARGO_PKG_LICENSE"),
        });
        let user = if name == SIDECAR { SIDECAR_USER } else { USER };
        let config = json!({
            "Entrypoint": [format!("/{path}")],
            "User": format!("{user}:{user}"),
            "WorkingDir": "/",
            "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"],
            "Labels": labels,
        });
        let (archive, digest) = pack(&entries, &config, architecture, &spec.name)?;
        Ok(Self { archive, digest, program_length, files })
    }
}

/// Returns the entries of each image.
fn common_entries() -> Entries {
    let mut entries = Entries::new();
    let (mut users, mut groups) = (String::new(), String::new());
    for (name, id) in [("root", 0), ("istio-proxy", SIDECAR_USER), ("nonroot", USER)] {
        users += &format!("{name}:x:{id}:{id}:{name}:/:/sbin/nologin\n");
        groups += &format!("{name}:x:{id}:\n");
    }
    add(&mut entries, "etc/passwd", 0o644, users.into());
    add(&mut entries, "etc/group", 0o644, groups.into());
    // Without this file, the C library might ask DNS before /etc/hosts.
    add(&mut entries, "etc/nsswitch.conf", 0o644, b"passwd: files\ngroup: files\nhosts: files dns\n".into());
    entries.insert("tmp".into(), Entry { mode: 0o1777, content: None });
    entries
}

/// Adds a file and the folders above it.
fn add(entries: &mut Entries, path: &str, mode: u32, content: Vec<u8>) {
    for folder in Path::new(path).ancestors().skip(1).filter_map(Path::to_str).filter(|path| !path.is_empty())
    {
        entries.insert(folder.to_owned(), Entry { mode: 0o755, content: None });
    }
    entries.insert(path.to_owned(), Entry { mode, content: Some(content) });
}

/// Returns the archive of an image, and the digest of its manifest.
fn pack(
    entries: &Entries,
    config: &Value,
    architecture: &str,
    name: &str,
) -> anyhow::Result<(Vec<u8>, String)> {
    let layer = tar(entries)?;
    let layer_digest = sha256(&layer);
    let layer = Blob::new("application/vnd.oci.image.layer.v1.tar+gzip", gzip(&layer)?);
    let platform = json!({ "architecture": architecture, "os": "linux" });
    let mut image = platform.clone();
    image["created"] = CREATED.into();
    image["config"] = config.clone();
    image["rootfs"] = json!({ "type": "layers", "diff_ids": [layer_digest] });
    image["history"] = json!([{ "created": CREATED, "created_by": "skysail image" }]);
    let config = Blob::json("application/vnd.oci.image.config.v1+json", &image);
    let media_type = "application/vnd.oci.image.manifest.v1+json";
    let manifest = json!({ "schemaVersion": 2, "mediaType": media_type, "config": config.descriptor(),
                           "layers": [layer.descriptor()] });
    let manifest = Blob::json(media_type, &manifest);
    let mut descriptor = manifest.descriptor();
    descriptor["platform"] = platform;
    let tag = name.rsplit_once(':').map_or("latest", |(_, tag)| tag);
    descriptor["annotations"] =
        json!({ "io.containerd.image.name": name, "org.opencontainers.image.ref.name": tag });
    let index = json!({ "schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json",
                        "manifests": [descriptor] });
    let docker = json!([{ "Config": config.path(), "RepoTags": [name], "Layers": [layer.path()] }]);
    let digest = manifest.digest.clone();
    let mut files = Entries::new();
    for blob in [layer, config, manifest] {
        add(&mut files, &blob.path(), 0o644, blob.content);
    }
    add(&mut files, "index.json", 0o644, index.to_string().into());
    add(&mut files, "manifest.json", 0o644, docker.to_string().into());
    add(&mut files, "oci-layout", 0o644, json!({ "imageLayoutVersion": "1.0.0" }).to_string().into());
    Ok((tar(&files)?, digest))
}

#[cfg(test)]
mod tests;
