"""Training scripts of frameworks, as their users write them."""

from __future__ import annotations

ACCELERATE = """
import torch
from torch import nn
from accelerate import Accelerator
torch.manual_seed(0)
a = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
sched = torch.optim.lr_scheduler.StepLR(opt, 5)
samples = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))
data = torch.utils.data.DataLoader(samples, batch_size=8)
net, opt, data, sched = a.prepare(net, opt, data, sched)
for epoch in range(2):
    for x, y in data:
        with a.accumulate(net):
            with a.autocast():
                loss = nn.functional.cross_entropy(net(x), y)
            a.backward(loss)
            if a.sync_gradients:
                a.clip_grad_norm_(net.parameters(), 1.0)
            opt.step(); sched.step(); opt.zero_grad()
print("weights", sum(float(p.detach().double().sum()) for p in net.parameters()))
"""

TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
set_seed(0)
class Data(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        x = torch.randint(0, 50, (16,), generator=g)
        return {"input_ids": x, "labels": x}
config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
args = TrainingArguments(
    "out", fp16=True, gradient_accumulation_steps=2, per_device_train_batch_size=4, max_steps=8,
    lr_scheduler_type="cosine", warmup_steps=2, report_to=[], save_strategy="no", disable_tqdm=True,
)
trainer = Trainer(model=model, args=args, train_dataset=Data())
trainer.train()
print("weights", sum(float(p.detach().double().sum()) for p in model.parameters()))
"""

LIGHTNING = """
import torch
from torch import nn
import lightning as L
L.seed_everything(0)
class M(L.LightningModule):
    def __init__(self):
        super().__init__(); self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    def training_step(self, batch, i):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)
    def configure_optimizers(self):
        o = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [o], [torch.optim.lr_scheduler.StepLR(o, 5)]
samples = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))
data = torch.utils.data.DataLoader(samples, batch_size=8)
m = M()
t = L.Trainer(
    max_epochs=2, precision="16-mixed", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    gradient_clip_val=1.0, accumulate_grad_batches=2,
)
t.fit(m, data)
print("weights", sum(float(p.detach().double().sum()) for p in m.parameters()))
"""

FABRIC = """
import torch
from torch import nn
from lightning.fabric import Fabric
torch.manual_seed(0)
f = Fabric(precision="16-mixed", devices=1)
f.launch()
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
net, opt = f.setup(net, opt)
samples = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))
data = f.setup_dataloaders(torch.utils.data.DataLoader(samples, batch_size=8))
for x, y in data:
    loss = nn.functional.cross_entropy(net(x), y)
    opt.zero_grad(); f.backward(loss); f.clip_gradients(net, opt, max_norm=1.0); opt.step()
print("weights", sum(float(p.detach().double().sum()) for p in net.parameters()))
"""
