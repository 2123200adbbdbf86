//! `skysail image`: container images of the programs, without a container engine.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use skysail_core::stdio;
use skysail_install::{Image, ImageSpec, check_image};

use crate::exit;

/// Arguments of `skysail image`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Each archive is an OCI image layout, DIR/PROGRAM.tar. To use it:

  containerd   ctr --namespace k8s.io images import DIR/skysaild.tar    (on each node)
  kind         kind load image-archive DIR/skysaild.tar
  Docker       docker load --input DIR/skysaild.tar
  a registry   skopeo copy oci-archive:DIR/skysaild.tar docker://REGISTRY/skysaild:TAG

An image contains the program, the libraries that it loads on this machine, and this machine's list of certificate \
authorities. The same files give the same bytes.")]
pub(crate) struct ImageArgs {
    /// Folder for the archives; created if it does not exist.
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    /// Program of an image. May be given several times.
    #[arg(long, value_enum, value_name = "PROGRAM", default_values = ["skysaild", "skysail-proxy"])]
    program: Vec<Program>,
    /// Folder with the programs [default: that of this program].
    #[arg(long, value_name = "DIR")]
    program_dir: Option<PathBuf>,
    /// Names of the images.
    #[command(flatten)]
    names: ImageNames,
}

/// How images are named, by `skysail image` and `skysail install`.
#[derive(Debug, clap::Args)]
pub(crate) struct ImageNames {
    /// Registry of the images, with a path. Images with the default are found on the nodes alone.
    #[arg(long, value_name = "REGISTRY", default_value = "localhost")]
    image_registry: String,
    /// Tag of the images.
    #[arg(long, value_name = "TAG", default_value = env!("CARGO_PKG_VERSION"))]
    image_tag: String,
}

/// A program of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Program {
    /// The control plane.
    Skysaild,
    /// The sidecar.
    SkysailProxy,
    /// All programs, such as the echo server.
    Skysail,
}

impl Program {
    fn name(self) -> &'static str {
        match self {
            Self::Skysaild => "skysaild",
            Self::SkysailProxy => "skysail-proxy",
            Self::Skysail => "skysail",
        }
    }

    fn description(self) -> &'static str {
        match self {
            Self::Skysaild => "Control plane of the Skysail service mesh",
            Self::SkysailProxy => "Sidecar of the Skysail service mesh",
            Self::Skysail => "All programs of the Skysail service mesh",
        }
    }
}

impl ImageNames {
    /// Returns the name of a program's image.
    pub(crate) fn of(&self, program: Program) -> anyhow::Result<String> {
        let name =
            format!("{}/{}:{}", self.image_registry.trim_end_matches('/'), program.name(), self.image_tag);
        check_image(&name).context("--image-registry, --image-tag")?;
        Ok(name)
    }

    /// Returns whether nodes cannot download the images.
    pub(crate) fn are_local(&self) -> bool {
        self.image_registry == "localhost"
    }
}

/// Makes the images.
pub(crate) fn run(args: &ImageArgs) -> anyhow::Result<u8> {
    let folder = match &args.program_dir {
        Some(folder) => folder.clone(),
        None => {
            let this = std::env::current_exe().context("cannot find this program's file")?;
            this.parent().map(Path::to_owned).unwrap_or_default()
        }
    };
    fs::create_dir_all(&args.output).with_context(|| args.output.display().to_string())?;
    for program in &args.program {
        let name = args.names.of(*program)?;
        let file = folder.join(program.name());
        if !file.is_file() {
            bail!(
                "{} does not exist; build it with `cargo build --profile dist --bins --package skysail-control \
                 --package skysail-proxy`, or name its folder with --program-dir",
                file.display()
            );
        }
        let image = Image::new(&ImageSpec {
            program: file,
            name: name.clone(),
            description: program.description().to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        })?;
        let archive = args.output.join(format!("{}.tar", program.name()));
        write(&archive, &image.archive).with_context(|| archive.display().to_string())?;
        let mb = |bytes: usize| format!("{:.1} MB", bytes as f64 / 1e6);
        stdio::print(format!(
            "{}: {name}, {}, program {}, {} files\n  {}",
            archive.display(),
            mb(image.archive.len()),
            mb(image.program_length),
            image.files.len(),
            image.digest
        ))?;
    }
    Ok(exit::OK)
}

/// Writes a file as a whole: a reader sees the former one or the new one.
fn write(file: &Path, content: &[u8]) -> std::io::Result<()> {
    let part = file.with_extension("tar.part");
    fs::write(&part, content)?;
    fs::rename(&part, file)
}
