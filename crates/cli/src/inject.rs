//! `skysail inject`: adds sidecars to the workloads in files, as the webhook of skysaild does in a cluster.

use std::{
    fs,
    io::{self, Read as _},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, anyhow, ensure};
use skysail_core::{
    logging::printable,
    stdio::{self, print_error},
};
use skysail_inject::{DocumentError, Interceptor, Namespaces, Settings, inject_text, namespaces_in};

use crate::exit;

/// Maximum length of a file in bytes.
const MAX_LENGTH: u64 = 32 << 20;
/// Name of standard input.
const STDIN: &str = "-";

/// Arguments of `skysail inject`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Prints all documents of the files in their order. A document that is no workload keeps its text; a workload is written \
anew, without its comments. Messages go to standard error.\n\n\
Each workload gets a sidecar, unless it refuses it (label sidecar.istio.io/inject), uses the network of its node, is \
injected already, or is in a namespace of the same files whose labels do not enable injection.")]
pub(crate) struct InjectArgs {
    /// File of Kubernetes YAML or JSON; - is standard input. May be given several times.
    #[arg(short, long = "filename", value_name = "FILE", required = true)]
    filenames: Vec<PathBuf>,
    /// File to write; - is standard output.
    #[arg(short, long, value_name = "FILE", default_value = STDIN)]
    output: PathBuf,
    /// Image of skysail-proxy.
    #[arg(long, value_name = "IMAGE")]
    image: String,
    /// Namespace of workloads that name none.
    #[arg(short, long, value_name = "NAMESPACE", default_value = "default")]
    namespace: String,
    /// Address of the control plane.
    #[arg(long, value_name = "HOST:PORT", default_value = "istiod.istio-system.svc:15012")]
    control_plane: String,
    /// Revision of the control plane.
    #[arg(long, value_name = "REVISION", default_value = "default")]
    revision: String,
    /// Cluster of the pods.
    #[arg(long, value_name = "ID", default_value = "Kubernetes")]
    cluster_id: String,
    /// Mesh configuration (MeshConfig, YAML). Of its fields, `defaultConfig`, `trustDomain` and `enablePrometheusMerge`
    /// concern injection.
    #[arg(long, value_name = "FILE")]
    mesh_config: Option<PathBuf>,
    /// Part that redirects connections to the sidecar.
    #[arg(long, value_enum, default_value_t)]
    interception: Interception,
}

/// Part that redirects connections.
#[derive(Clone, Copy, Debug, Default, clap::ValueEnum)]
enum Interception {
    /// An init container in each pod, with the capability NET_ADMIN.
    #[default]
    Init,
    /// A CNI plugin on the nodes.
    Cni,
}

/// Injects the files and prints the result.
pub(crate) fn run(args: &InjectArgs) -> anyhow::Result<u8> {
    let mut settings = Settings::new(&args.image);
    settings.control_plane.clone_from(&args.control_plane);
    settings.is_default_revision = args.revision == settings.revision;
    settings.revision.clone_from(&args.revision);
    settings.cluster_id.clone_from(&args.cluster_id);
    settings.interceptor = match args.interception {
        Interception::Init => Interceptor::InitContainer,
        Interception::Cni => Interceptor::Cni,
    };
    if let Some(file) = &args.mesh_config {
        let text = read(file)?;
        settings.apply_mesh_config(&text).with_context(|| file.display().to_string())?;
    }
    let failed = |file: &Path, error: &DocumentError| {
        anyhow!("{}", printable(format_args!("{}:{error}", file.display())))
    };
    let (mut texts, mut namespaces) = (Vec::new(), Namespaces::new());
    for file in &args.filenames {
        let text = read(file)?;
        namespaces.extend(namespaces_in(&text).map_err(|error| failed(file, &error))?);
        texts.push((file, text));
    }
    let mut output = String::new();
    for (file, text) in &texts {
        let result = inject_text(text, &args.namespace, &namespaces, &settings);
        let result = result.map_err(|error| failed(file, &error))?;
        let file = file.display();
        for message in &result.messages {
            print_error(printable(format_args!("{file}:{message}")));
        }
        append(&mut output, &result.text);
    }
    if args.output.as_os_str() == STDIN {
        stdio::write(output.as_bytes())?;
    } else {
        fs::write(&args.output, output).with_context(|| args.output.display().to_string())?;
    }
    Ok(exit::OK)
}

/// Appends the documents of a file.
fn append(output: &mut String, text: &str) {
    if !output.is_empty() {
        if !output.ends_with('\n') {
            output.push('\n');
        }
        if !text.starts_with("---") {
            output.push_str("---\n");
        }
    }
    output.push_str(text);
}

/// Reads a file, or standard input.
fn read(file: &PathBuf) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    let read = if file.as_os_str() == STDIN {
        io::stdin().lock().take(MAX_LENGTH + 1).read_to_end(&mut bytes)
    } else {
        fs::File::open(file).and_then(|open| open.take(MAX_LENGTH + 1).read_to_end(&mut bytes))
    };
    let name = || file.display().to_string();
    read.with_context(name)?;
    ensure!(bytes.len() as u64 <= MAX_LENGTH, "{}: more than {} MiB", name(), MAX_LENGTH >> 20);
    String::from_utf8(bytes).with_context(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_separated_once() {
        let mut output = String::new();
        for text in ["a: 1", "---\nb: 2\n", "c: 3\n"] {
            append(&mut output, text);
        }
        assert_eq!(output, "a: 1\n---\nb: 2\n---\nc: 3\n");
    }
}
