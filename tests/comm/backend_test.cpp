// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/backend.h"

#include <algorithm>
#include <cstdlib>
#include <dlfcn.h>
#include <filesystem>
#include <gtest/gtest.h>
#include <link.h>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/types.h>

#include "cohort/base/error.h"
#include "cohort/comm/plugin_file.h"

#include "tests/base/temporary_folder.h"
#include "tests/support/ranks.h"

namespace cohort::comm {
namespace backend_test {

namespace fs = std::filesystem;

// Where the plug-ins of these tests lie; the build says.
fs::path plugin_folder() {
  return COHORT_TEST_PLUGINS;
}

class BackendTest : public testing::Test {
 protected:
  void SetUp() override { search({plugin_folder()}); }
  static void search(const std::vector<fs::path>& folders) {
    std::string path;
    for (const auto& folder : folders) path += (path.empty() ? "" : ":") + folder.string();
    setenv("COHORT_BACKEND_PATH", path.c_str(), 1);
  }
};

std::string error_of(const std::string& name) {
  try {
    find_backend(name);
  } catch (const ConfigError& error) {
    return one_line(error);
  }
  return "no error";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

int calls_of_hccl() {
  const std::string file = plugin_folder() / "libcohort_hccl.so";
  void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (handle == nullptr) return -1;
  const int calls = reinterpret_cast<int (*)()>(dlsym(handle, "cohort_hccl_calls"))();
  dlclose(handle);
  return calls;
}

TEST_F(BackendTest, GlooIsBuiltInAndServesTheCpu) {
  EXPECT_EQ(find_backend("gloo").device, c10::DeviceType::CPU);
  EXPECT_TRUE(find_backend("gloo").make);
}

TEST_F(BackendTest, AnUnknownNameListsWhatThereIsAndWhereItLooked) {
  const std::string error = error_of("nonesuch");
  EXPECT_TRUE(contains(error, "backend \"nonesuch\" is unknown: there is ")) << error;
  EXPECT_TRUE(contains(error, "gloo, gloo_cuda, hccl, ")) << error;
  EXPECT_TRUE(contains(error, "libcohort_nonesuch.so is not in " + plugin_folder().string() + ", "))
      << error;
  EXPECT_TRUE(contains(error, "/lib, the dynamic loader's path")) << error;
  EXPECT_FALSE(contains(error, "sentencepiece"))
      << "a library beside them is no backend: " << error;
}

TEST_F(BackendTest, ANameOfOtherLettersIsRefused) {
  for (const std::string name : {"", "Gloo", "../hccl", "a b", "gloo\n", "x/y"}) {
    EXPECT_TRUE(
        contains(error_of(name), "is no name of a backend: expected letters a-z, digits and _"))
        << name;
  }
}

TEST_F(BackendTest, ARegisteredBackendIsFoundAndGoesBeforeAFile) {
  const TemporaryFolder folder;
  fs::copy_file(plugin_folder() / "libcohort_hccl.so", folder / "libcohort_registered.so");
  search({folder.path()});
  register_backend("registered",
                   {.device = c10::DeviceType::Meta, .make = find_backend("gloo").make});
  EXPECT_EQ(find_backend("registered").device, c10::DeviceType::Meta);
}

TEST_F(BackendTest, RegisteringChecksItsArguments) {
  const auto make = find_backend("gloo").make;
  const auto text = [](const std::string& name, BackendPlugin plugin) {
    try {
      register_backend(name, std::move(plugin));
    } catch (const c10::ValueError& error) {
      return one_line(error);
    }
    return std::string("no error");
  };
  EXPECT_TRUE(
      contains(text("Mine", {.make = make}), "expected a name of [a-z0-9_]+, got \"Mine\""));
  EXPECT_TRUE(contains(text("mine", {}), "backend \"mine\" has no make function"));
  EXPECT_EQ(text("mine", {.make = make}), "no error");
  EXPECT_TRUE(contains(text("mine", {.make = make}), "there is a backend \"mine\" already"));
}

TEST_F(BackendTest, AFileOnThePathIsLoadedOnceWithItsDevice) {
  const BackendPlugin& first = find_backend("hccl");
  EXPECT_EQ(first.device, c10::DeviceType::CPU);
  EXPECT_EQ(find_backend("hccl_meta").device, c10::DeviceType::Meta);
  search({});
  std::vector<const BackendPlugin*> seen(8);
  {
    std::vector<std::jthread> threads;
    for (auto& slot : seen) threads.emplace_back([&slot] { slot = &find_backend("hccl"); });
  }
  for (const auto* plugin : seen) EXPECT_EQ(plugin, &first);
}

TEST_F(BackendTest, AGroupComputesOnItsBackendsDevice) {
  const ProcessGroup group(RankInfo{}, {.backend = "hccl_meta"});
  EXPECT_EQ(group.device(), at::Device(at::kMeta, 0));
}

TEST_F(BackendTest, TheFirstFolderOfThePathWins) {
  const TemporaryFolder first;
  const TemporaryFolder second;
  fs::copy_file(plugin_folder() / "libcohort_hccl_meta.so", first / "libcohort_twice.so");
  fs::copy_file(plugin_folder() / "libcohort_hccl.so", second / "libcohort_twice.so");
  search({first.path(), second.path()});
  EXPECT_EQ(find_backend("twice").device, c10::DeviceType::Meta);
}

TEST_F(BackendTest, AFileThatDoesNotFitIsNamedWithItsVersions) {
  const auto file = [](const char* name) {
    return (plugin_folder() / ("libcohort_" + std::string(name) + ".so")).string();
  };
  EXPECT_EQ(error_of("bad_version"),
            file("bad_version") +
                " was built for version 44 of Cohort's backend interface: expected version 3");
  EXPECT_EQ(
      error_of("bad_libtorch"),
      file("bad_libtorch") + " was built for libtorch 1.13.1: expected libtorch " TORCH_VERSION);
  EXPECT_EQ(error_of("bad_make"),
            file("bad_make") + " is no backend of Cohort: its make function is missing");
  EXPECT_EQ(error_of("bad_null"),
            file("bad_null") + " is no backend of Cohort: its cohort_backend() returned nothing");
  EXPECT_EQ(error_of("bad_entry"),
            file("bad_entry") + " is no backend of Cohort: expected it to export cohort_backend()");
}

TEST_F(BackendTest, AFileThatDoesNotLoadSaysWhy) {
  const std::string dependency = error_of("bad_dependency");
  EXPECT_TRUE(contains(dependency,
                       "libcohort_bad_dependency.so cannot be loaded: libcohort_test_absent.so: "))
      << dependency;
  const TemporaryFolder folder;
  write_file(folder / "libcohort_broken.so",
             "this is no shared object, but long enough to have a header\n");
  search({folder.path()});
  const std::string broken = error_of("broken");
  EXPECT_TRUE(contains(broken, "libcohort_broken.so cannot be loaded: ")) << broken;
}

TEST_F(BackendTest, AFileCutShortIsRefusedBeforeTheLoaderMapsIt) {
  const TemporaryFolder folder;
  const std::string whole = read_file(plugin_folder() / "libcohort_hccl.so");
  search({folder.path()});
  for (const size_t size : {size_t{5000}, size_t{100}, size_t{10}, size_t{0}}) {
    const std::string name = "cut" + std::to_string(size);
    const std::string file = folder / ("libcohort_" + name + ".so");
    write_file(file, whole.substr(0, size));
    const std::string why =
        size < sizeof(ElfW(Ehdr))
            ? "expected an ELF shared object"
            : "it is cut short: its segments end behind its " + std::to_string(size) + " bytes";
    EXPECT_EQ(error_of(name), "backend in " + file + " cannot be loaded: " + why);
  }
}

TEST_F(BackendTest, AFolderCalledLikeABackendIsNone) {
  const TemporaryFolder folder;
  fs::create_directory(folder / "libcohort_folder.so");
  search({folder.path()});
  EXPECT_EQ(error_of("folder"),
            "backend in " + (folder / "libcohort_folder.so") + " cannot be loaded: Is a directory");
  const std::string error = error_of("nonesuch");
  EXPECT_TRUE(contains(error, "backend \"nonesuch\" is unknown: there is ")) << error;
  EXPECT_FALSE(contains(error, "there is folder, ") || contains(error, ", folder")) << error;
}

TEST_F(BackendTest, NoFolderIsListedTwice) {
  search({plugin_folder(), "elsewhere", plugin_folder()});
  std::vector<fs::path> folders = plugin_folders();
  ASSERT_GE(folders.size(), 3U);
  EXPECT_EQ(folders[0], plugin_folder());
  EXPECT_EQ(folders[1], "elsewhere");
  std::ranges::sort(folders);
  EXPECT_EQ(std::ranges::adjacent_find(folders), folders.end());
}

// As in an installation, whose backends lie in lib/cohort/lib: a program of the user's finds them.
TEST_F(BackendTest, AFileBelowTheFolderOfTheBaseLibraryIsFound) {
  const char* bin = std::getenv("COHORT_BIN");
  ASSERT_NE(bin, nullptr) << "expected COHORT_BIN, the folder of the programs that were built";
  const fs::path installed = (fs::path(bin) / "../lib/cohort/lib").lexically_normal();
  fs::create_directories(installed);
  fs::copy_file(plugin_folder() / "libcohort_hccl_meta.so", installed / "libcohort_beside_base.so",
                fs::copy_options::overwrite_existing);
  search({});
  EXPECT_EQ(error_of("beside_base"), "no error");
  EXPECT_TRUE(contains(error_of("nonesuch"), installed.string() + ", the dynamic loader's path"));
  fs::remove(installed / "libcohort_beside_base.so");
}

// Runs `body` on ranks that are threads of this process with a backend each.
void threads_on(const std::string& name, int world_size,
                const std::function<void(c10d::Backend&)>& body) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const BackendPlugin& plugin = find_backend(name);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      const auto backend = plugin.make({.store = store,
                                        .rank = rank,
                                        .world_size = world_size,
                                        .timeout = std::chrono::seconds(20),
                                        .address = "127.0.0.1",
                                        .interface = ""});
      body(*backend);
    });
  }
}

TEST_F(BackendTest, CollectivesOfAPluginAndOfGlooAgree) {
  for (const std::string name : {"gloo", "hccl"}) {
    threads_on(name, 3, [](c10d::Backend& backend) {
      std::vector<at::Tensor> sum{at::full({4}, backend.getRank() + 1.0)};
      backend.allreduce(sum, {})->wait();
      EXPECT_TRUE(at::equal(sum[0], at::full({4}, 6.0)));
      std::vector<at::Tensor> told{at::full({2}, backend.getRank())};
      backend.broadcast(told, {.rootRank = 2})->wait();
      EXPECT_TRUE(at::equal(told[0], at::full({2}, 2)));
      std::vector<at::Tensor> own{at::full({1}, backend.getRank())};
      std::vector<std::vector<at::Tensor>> all{{at::zeros({1}), at::zeros({1}), at::zeros({1})}};
      all[0] = {at::zeros_like(own[0]), at::zeros_like(own[0]), at::zeros_like(own[0])};
      backend.allgather(all, own, {})->wait();
      for (int64_t i = 0; i < 3; ++i) EXPECT_EQ(all[0][static_cast<size_t>(i)].item<int64_t>(), i);
      backend.barrier(c10d::BarrierOptions{})->wait();
    });
  }
  EXPECT_GE(calls_of_hccl(), 12);
}

// The group asks the plug-in, not Gloo: the plug-in's own count moves with every sum.
TEST_F(BackendTest, AGroupRunsOnThePluginThatItsOptionsName) {
  const auto ends = test::run_ranks(
      2,
      [](const ProcessGroup& group) {
        const int before = calls_of_hccl();
        EXPECT_EQ(group.all_reduce_sum(group.rank() + 1), 3);
        EXPECT_GT(calls_of_hccl(), before);
        const std::vector<std::string> both{"a", "bc"};
        EXPECT_EQ(group.all_gather_object(both[static_cast<size_t>(group.rank())]), both);
      },
      {.backend = "hccl"});
  for (const auto& end : ends) EXPECT_EQ(end.exit_code, 0) << end.output;
}

}  // namespace backend_test
}  // namespace cohort::comm
