//! The volumes of one pod as folders in memory. They are mounted in the pod's mount namespace, so they end with the pod
//! in every case.
//!
//! Files of objects are replaced as the kubelet does it. All files of a volume are in a folder, `..data` is a symbolic
//! link to that folder, and each name leads through `..data`. A new version is a new folder, and the link is replaced
//! by rename, so readers see one version as a whole.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs::{self, DirBuilder, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _, symlink},
    path::{Path, PathBuf},
};

use super::{Contents, FileContent, VolumeFile, VolumeKind, folder};
use crate::mounts::{bind, tmpfs};

/// Size limit of all files of objects in a pod. Each object has 1 MiB at most, and two versions exist during an update.
const FILES: &str = "mode=0700,size=512m";

/// A volume that a pod's programs mount.
#[derive(Clone, Debug)]
pub(crate) struct VolumeSetup {
    pub(crate) name: String,
    pub(crate) number: usize,
    pub(crate) kind: VolumeKind,
    /// Folder of the claim.
    pub(crate) claim: Option<PathBuf>,
}

/// Volumes of a pod.
#[derive(Debug, Default)]
pub(crate) struct Store {
    /// State of each volume with files.
    files: BTreeMap<String, FileVolume>,
}

#[derive(Debug)]
struct FileVolume {
    folder: PathBuf,
    /// Files that were last written; tokens by their audience only.
    written: Option<BTreeMap<PathBuf, VolumeFile>>,
    /// Number of the folder to which `..data` leads; 0 without one.
    version: u64,
}

impl Store {
    /// Creates the folders, in the mount namespace of the pod.
    pub(crate) fn make(pod: &Path, volumes: &[VolumeSetup]) -> io::Result<Self> {
        let mut files = BTreeMap::new();
        if volumes.is_empty() {
            return Ok(Self { files });
        }
        let all = pod.join("volumes");
        fs::create_dir_all(&all)?;
        tmpfs(&all, FILES)?;
        for VolumeSetup { name, number, kind, claim } in volumes {
            let folder = folder(pod, *number);
            fs::create_dir(&folder)?;
            match kind {
                VolumeKind::Files => {
                    fs::set_permissions(&folder, fs::Permissions::from_mode(0o755))?;
                    files.insert(name.clone(), FileVolume { folder, written: None, version: 0 });
                }
                VolumeKind::Memory(limit) => tmpfs(&folder, &format!("mode=0777,size={limit}"))?,
                VolumeKind::Claim(_) => {
                    let claim = claim.as_ref().ok_or_else(|| io::Error::other("the claim has no folder"))?;
                    bind(claim, &folder, nix::mount::MsFlags::empty())?;
                }
            }
        }
        Ok(Self { files })
    }

    /// Writes the volumes whose files have changed, and those with tokens. A volume that lacks its object keeps its
    /// files. Fails with the reason for which a volume without any files yet must wait.
    pub(crate) fn write(
        &mut self,
        contents: &Contents,
        token: impl Fn(&str) -> io::Result<String>,
    ) -> Result<(), String> {
        let mut waits = Ok(());
        for (name, volume_state) in &mut self.files {
            let problem = match contents.get(name) {
                Some(Ok(files)) => match volume_state.write(files, &token) {
                    Ok(()) => continue,
                    Err(error) => error.to_string(),
                },
                Some(Err(missing)) => missing.clone(),
                None => continue,
            };
            match volume_state.written {
                Some(_) => tracing::warn!(volume = name, problem, "the volume keeps its files"),
                None if waits.is_ok() => waits = Err(format!("volume {name}: {problem}")),
                None => {}
            }
        }
        waits
    }
}

impl FileVolume {
    fn write(
        &mut self,
        files: &BTreeMap<PathBuf, VolumeFile>,
        token: &impl Fn(&str) -> io::Result<String>,
    ) -> io::Result<()> {
        let has_token = files.values().any(|(_, content)| matches!(content, FileContent::Token(_)));
        if self.written.as_ref() == Some(files) && !has_token {
            return Ok(());
        }
        let version = format!("..{}", self.version + 1);
        let new = self.folder.join(&version);
        // A failed update may have left it.
        let _ = fs::remove_dir_all(&new);
        fs::create_dir(&new)?;
        for (path, (mode, content)) in files {
            let path = new.join(path);
            if let Some(parent) = path.parent() {
                DirBuilder::new().recursive(true).mode(0o755).create(parent)?;
            }
            let token = match content {
                FileContent::Token(audience) => token(audience)?.into_bytes(),
                FileContent::Bytes(_) => Vec::new(),
            };
            let bytes = if let FileContent::Bytes(bytes) = content { bytes } else { &token };
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
            file.write_all(bytes)?;
            file.set_permissions(fs::Permissions::from_mode(*mode))?;
        }
        let link = self.folder.join("..data_tmp");
        let _ = fs::remove_file(&link);
        symlink(&version, &link)?;
        fs::rename(&link, self.folder.join("..data"))?;
        let _ = fs::remove_dir_all(self.folder.join(format!("..{}", self.version)));
        self.version += 1;
        self.lead(files)?;
        self.written = Some(files.clone());
        Ok(())
    }

    /// Makes a link for every name that is visible, and removes the others.
    fn lead(&self, files: &BTreeMap<PathBuf, VolumeFile>) -> io::Result<()> {
        let first = |path: &PathBuf| path.components().next().map(|part| part.as_os_str().to_owned());
        let names: std::collections::BTreeSet<_> = files.keys().filter_map(first).collect();
        for entry in fs::read_dir(&self.folder)? {
            let name = entry?.file_name();
            let is_own = OsStr::as_encoded_bytes(&name).starts_with(b"..");
            if !is_own && !names.contains(&name) {
                fs::remove_file(self.folder.join(&name))?;
            }
        }
        for name in names {
            match symlink(Path::new("..data").join(&name), self.folder.join(&name)) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => made?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(files: &[(&str, &str, u32)]) -> Contents {
        let files = files.iter().map(|(path, text, mode)| {
            (PathBuf::from(path), (*mode, FileContent::Bytes(text.as_bytes().to_vec())))
        });
        Contents::from([("v".to_owned(), Ok(files.collect()))])
    }

    fn store(folder: &Path) -> Store {
        let volume_state = FileVolume { folder: folder.to_owned(), written: None, version: 0 };
        Store { files: BTreeMap::from([("v".to_owned(), volume_state)]) }
    }

    #[test]
    fn a_new_version_replaces_all_files_atomically() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = store(folder.path());
        let token = |_: &str| Ok("token".to_owned());
        store.write(&files(&[("a", "1", 0o644), ("d/b", "2", 0o400)]), token).unwrap();
        let first = fs::read_link(folder.path().join("..data")).unwrap();
        assert_eq!(fs::read_to_string(folder.path().join("d/b")).unwrap(), "2");
        let mode = |file: &str| fs::metadata(folder.path().join(file)).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode("a"), mode("d/b")), (0o644, 0o400));
        // Equal files are not written again.
        store.write(&files(&[("a", "1", 0o644), ("d/b", "2", 0o400)]), token).unwrap();
        assert_eq!(fs::read_link(folder.path().join("..data")).unwrap(), first);
        store.write(&files(&[("a", "3", 0o644)]), token).unwrap();
        assert_eq!(fs::read_to_string(folder.path().join("a")).unwrap(), "3");
        assert!(!folder.path().join("d").exists() && !folder.path().join(first).exists());
        // A volume keeps its files when its object is removed.
        store.write(&Contents::from([("v".to_owned(), Err("gone".to_owned()))]), token).unwrap();
        assert_eq!(fs::read_to_string(folder.path().join("a")).unwrap(), "3");
    }

    #[test]
    fn a_volume_without_its_object_waits_and_tokens_are_renewed() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = store(folder.path());
        let missing = Contents::from([("v".to_owned(), Err("ConfigMap n/m does not exist".to_owned()))]);
        let waits = store.write(&missing, |_| Ok(String::new())).unwrap_err();
        assert_eq!(waits, "volume v: ConfigMap n/m does not exist");
        let entry = (0o600, FileContent::Token("someone".to_owned()));
        let contents = Contents::from([("v".to_owned(), Ok([(PathBuf::from("token"), entry)].into()))]);
        for round in ["first", "second"] {
            store.write(&contents, |audience| Ok(format!("{round} for {audience}"))).unwrap();
            let text = fs::read_to_string(folder.path().join("token")).unwrap();
            assert_eq!(text, format!("{round} for someone"));
        }
    }

    #[test]
    fn only_the_last_version_remains_after_failed_writes() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = store(folder.path());
        let token = (0o600, FileContent::Token("someone".to_owned()));
        let contents = Contents::from([("v".to_owned(), Ok([(PathBuf::from("token"), token)].into()))]);
        for fails in [true, false, true, true, false, true] {
            let token = |_: &str| if fails { Err(io::Error::other("no token")) } else { Ok(String::new()) };
            // A volume that has files keeps them.
            let _ = store.write(&contents, token);
        }
        store.write(&contents, |_| Ok("last".to_owned())).unwrap();
        assert_eq!(fs::read_to_string(folder.path().join("token")).unwrap(), "last");
        let entries = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
        let mut entries: Vec<_> = entries.map(|name| name.into_string().unwrap()).collect();
        entries.sort_unstable();
        let live =
            fs::read_link(folder.path().join("..data")).unwrap().into_os_string().into_string().unwrap();
        assert_eq!(entries, [live.as_str(), "..data", "token"]);
    }
}
