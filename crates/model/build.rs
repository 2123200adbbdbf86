//! Reduces the descriptors of Envoy's messages to what the conversion of `patch.value` of an EnvoyFilter needs.
//!
//! Options, services and annotations are removed. Messages of Istio that Envoy's API does not contain are added.

use std::{collections::BTreeSet, env, fs, path::PathBuf};

use prost::Message as _;
use prost_types::{FileDescriptorProto, FileDescriptorSet};
use skysail_descriptors::{Result, envoy_file, is_annotation, istio_files, strip};

fn main() -> Result<()> {
    println!("cargo::rerun-if-changed=build.rs");
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let source = envoy_file()?;
    println!("cargo::rerun-if-changed={}", source.display());
    let set = FileDescriptorSet::decode(fs::read(&source)?.as_slice())?;
    let declared = |file: &FileDescriptorProto| {
        file.message_type
            .iter()
            .map(|message| format!("{}.{}", file.package(), message.name()))
            .collect::<Vec<_>>()
    };
    let messages: BTreeSet<String> = set.file.iter().flat_map(declared).collect();
    let files = set.file.into_iter().filter(|file| !is_annotation(file.name()));
    let mut files: Vec<FileDescriptorProto> = files.map(strip).collect();
    let is_new = |file: &FileDescriptorProto| !declared(file).iter().any(|name| messages.contains(name));
    files.extend(istio_files().into_iter().filter(is_new));
    let known: BTreeSet<String> = files.iter().map(|file| file.name().to_owned()).collect();
    files.iter_mut().for_each(|file| file.dependency.retain(|name| known.contains(name)));
    fs::write(out.join("descriptors.bin"), FileDescriptorSet { file: files }.encode_to_vec())?;
    Ok(())
}
