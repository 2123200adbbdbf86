//! Archives, compression and digests. Nothing depends on the time or on the user.

use std::io::Write as _;

use aws_lc_rs::digest::{SHA256, digest};
use flate2::{Compression, GzBuilder};
use serde_json::{Value, json};
use tar::{Builder, EntryType, Header};

use super::Entries;

/// A part of an image, named by its digest.
pub(super) struct Blob {
    media_type: &'static str,
    /// Digest, with the name of the algorithm.
    pub(super) digest: String,
    pub(super) content: Vec<u8>,
}

impl Blob {
    pub(super) fn new(media_type: &'static str, content: Vec<u8>) -> Self {
        Self { media_type, digest: sha256(&content), content }
    }

    pub(super) fn json(media_type: &'static str, value: &Value) -> Self {
        Self::new(media_type, value.to_string().into())
    }

    /// Returns what refers to the blob (OCI content descriptor).
    pub(super) fn descriptor(&self) -> Value {
        json!({ "mediaType": self.media_type, "digest": self.digest, "size": self.content.len() })
    }

    /// Returns the path in an OCI image layout.
    pub(super) fn path(&self) -> String {
        format!("blobs/{}", self.digest.replace(':', "/"))
    }
}

/// Returns the digest of bytes, with the name of the algorithm.
pub(super) fn sha256(bytes: &[u8]) -> String {
    let hash = digest(&SHA256, bytes);
    hash.as_ref().iter().fold("sha256:".to_owned(), |text, byte| text + &format!("{byte:02x}"))
}

/// Returns compressed bytes, without a time and without the name of the system.
pub(super) fn gzip(bytes: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut encoder =
        GzBuilder::new().operating_system(UNKNOWN_SYSTEM).write(Vec::new(), Compression::best());
    encoder.write_all(bytes)?;
    encoder.finish()
}

/// Code of an unknown operating system (RFC 1952, section 2.3.1).
const UNKNOWN_SYSTEM: u8 = 255;

/// Returns an archive of entries, sorted by path.
pub(super) fn tar(entries: &Entries) -> std::io::Result<Vec<u8>> {
    let mut builder = Builder::new(Vec::new());
    for (path, entry) in entries {
        let mut header = Header::new_ustar();
        header.set_mode(entry.mode);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        let content = entry.content.as_deref();
        header.set_entry_type(if content.is_some() { EntryType::Regular } else { EntryType::Directory });
        let content = content.unwrap_or_default();
        header.set_size(content.len() as u64);
        let path = if entry.content.is_some() { path.clone() } else { format!("{path}/") };
        builder.append_data(&mut header, path, content)?;
    }
    builder.into_inner()
}
